"""Adapters of a running engine: requests come, end, are aborted and fail beside each other.

LORA_CASES=all adds options and steps.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.lora.adapters import linears_of, write_adapter
from tests.lora.test_equality import MANY, OPTIONS, ask, bits, mixed
from tests.training.weights import SMALL

NUM_STEPS = 600 if MANY else 60
CASES: list[dict[str, Any]] = [
    {"max_loras": 1, "num_kvcache_blocks": 14, "max_num_batched_tokens": 40},
    {"max_loras": 2, "kv_offload_gib": 0.01, "num_kvcache_blocks": 14},
    {"max_loras": 2, "speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
]


class Files:
    """The files of adapters, which change and come back."""

    def __init__(self, paths: list[str]) -> None:
        files = [Path(path, "adapter_model.safetensors") for path in paths]
        self._whole = {file: file.read_bytes() for file in files}
        self._changed: set[Path] = set()

    def change(self, rng: random.Random) -> None:
        file = rng.choice(list(self._whole))
        self._changed ^= {file}
        whole = self._whole[file]
        file.write_bytes(whole[:-4] + b"\0\0\0\0" if file in self._changed else whole)


@pytest.mark.parametrize("options", CASES if MANY else CASES[:1], ids=str)
def test_each_that_ends_has_its_own_bits(
    make_llm: Any, shared_checkpoint: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """The next step is launched before the last one's tokens are known; slots change hands."""
    model = shared_checkpoint(**SMALL)
    linears = linears_of(model)
    paths = [write_adapter(tmp_path / str(i), linears, seed=i) for i in range(3)]
    shared = {**OPTIONS, "dtype": "bfloat16", "kvcache_block_size": 32}
    alone = make_llm(model, **shared, max_num_seqs=1, enable_prefix_caching=False)
    asked = mixed(paths, 8, lengths=(10, 60))
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=6, ignore_eos=True, logprobs=1)
    expected = [bits(ask(alone, [each], params))[0] for each in asked]
    llm: LLM = make_llm(model, **{**shared, "max_num_seqs": 5, **options})
    ask(llm, asked, params)  # the files of now are the adapters'
    engine = llm.engine
    engine.queue_depth = 1
    rng, files = random.Random(0), Files(paths)
    running: dict[str, int] = {}
    reasons = []
    for step in range(NUM_STEPS + 200):
        while step < NUM_STEPS and len(running) < 8:
            index = rng.randrange(len(asked))
            prompt, adapter = asked[index]
            running[engine.add_request(prompt, params, lora_request=adapter)] = index
        if rng.random() < 0.1 and running:
            aborted = rng.choice(list(running))
            engine.abort(aborted)
            del running[aborted]
        if rng.random() < 0.2:
            files.change(rng)
        for output in engine.step():
            if output.finished and output.request_id in running:
                index = running.pop(output.request_id)
                reasons.append(output.outputs[0].finish_reason)
                assert reasons[-1] == "error" or bits([output]) == [expected[index]]
    assert not running
    assert min(reasons.count("length"), reasons.count("error")) > 3
