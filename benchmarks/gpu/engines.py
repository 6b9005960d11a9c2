"""Engines with random weights in the shapes of Qwen3, and the time of their decode steps."""

import contextlib
import gc
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.part import Record
from benchmarks.shapes import CONFIGS, kv_bytes

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine

BATCHES = (1, 64, 256)
WARM_STEPS = 16


def model_path(record: Record, name: str) -> str:
    """Return the directory of a model's config and tokenizer, written on first use.

    The tokenizer is a byte-level one in which each token is a word.
    """
    path = record.scratch / "models" / name
    if not (path / "config.json").exists():
        write_model(path, CONFIGS[name])
    return str(path)


def write_model(path: Path, config: dict[str, Any]) -> None:
    """Write a tokenizer, then the config: where a config is, all is."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {f"Ġw{token}": token for token in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps(config))


def make_engine(
    record: Record, name: str, queue_depth: int | None = None, **options: Any
) -> "LLMEngine":
    """Return an engine with random weights and without prefix caching."""
    from nanovllm import factory
    from nanovllm.options.config import Config

    config = Config(
        model=model_path(record, name),
        load_format="dummy",
        enable_prefix_caching=False,
        **options,
    )
    return factory.make_engine(config, queue_depth=queue_depth)


def pool_bytes(name: str, batch: int, length: int) -> int:
    """Return the size of a KV pool for `batch` rows that grow by at most 512 tokens."""
    return batch * (length + 512) * kv_bytes(CONFIGS[name])


@contextlib.contextmanager
def decoding(engine: "LLMEngine", batch: int, length: int) -> Iterator[None]:
    """Start `batch` sequences with prompts of `length`, decode WARM_STEPS, and abort them on exit.

    On entry each sequence has at least 300 more tokens to generate.
    """
    from nanovllm import SamplingParams

    rng = random.Random(0)
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=300 + WARM_STEPS + 64)
    before = engine.stats.num_prefill_tokens
    requests = [
        engine.add_request([rng.randint(0, 10000) for _ in range(length)], params)
        for _ in range(batch)
    ]
    while engine.stats.num_prefill_tokens - before < batch * (length - 1):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    try:
        yield
    finally:
        for request in requests:
            engine.abort(request)
        while not engine.is_finished():
            engine.step()


def step_seconds(engine: "LLMEngine", batch: int, steps: int) -> float:
    """Return the seconds of a decode step, by the host's clock."""
    before, start = engine.stats.num_decode_tokens, time.perf_counter()
    for _ in range(steps):
        engine.step()
    seconds = time.perf_counter() - start
    return seconds * batch / (engine.stats.num_decode_tokens - before)


def release() -> None:
    """Free the GPU memory of engines that nobody refers to any more."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
