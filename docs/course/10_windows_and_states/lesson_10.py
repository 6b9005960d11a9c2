"""Lesson 10: layers that keep less than the keys and values of all tokens."""

import json
import tempfile
from pathlib import Path
from typing import Any

from nanovllm import LLM, SamplingParams

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
}
KINDS: dict[str, dict[str, Any]] = {
    "2 with full attention": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "1 full, 1 with a window of 8": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
    },
    "1 full, 1 with a state": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"],
        "conv_L_cache": 3,
    },
}


def make_llm(directory: Path, fields: dict[str, Any]) -> LLM:
    """Return a model with random weights: what it says is noise, what it keeps is real."""
    (directory / "config.json").write_text(json.dumps(SIZES | fields))
    return LLM(
        str(directory),
        device="cpu",
        dtype="float32",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=64,
        kvcache_block_size=4,
        num_kvcache_blocks=64,
        enable_prefix_caching=False,
    )


def pages(llm: LLM, num_tokens: int) -> list[tuple[int, int]]:
    """Return after each step (pages of layers with full attention, pages of the others)."""
    engine = llm.engine
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
    request = engine.input_processor.make_request({"prompt_token_ids": [5, 6, 7, 8]}, params)
    engine.queue(request)
    [seq] = request.sequences
    manager = engine.scheduler.block_manager
    found: list[tuple[int, int]] = []
    while True:
        schedule: Any = engine.scheduler.schedule()
        result = engine.executor.execute(schedule).result()
        engine.scheduler.update(schedule, result)
        if seq.is_finished:
            return found
        used = len(manager.blocks) - manager.num_free_blocks
        found.append((len(seq.kv.block_table), used - len(seq.kv.block_table)))


def run() -> dict[str, list[tuple[int, int]]]:
    """Return these pages for each kind of model."""
    with tempfile.TemporaryDirectory() as name:
        return {kind: pages(make_llm(Path(name), KINDS[kind]), 30) for kind in KINDS}


def main() -> None:
    for kind, steps in run().items():
        print(f"layers: {kind}")
        for step in range(0, len(steps), 7):
            full, other = steps[step]
            print(f"  {4 + step:2} tokens computed: {full} full pages, {other} others")


if __name__ == "__main__":
    main()
