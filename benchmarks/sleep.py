"""How much memory `LLM.sleep` gives back to the system: `python -m benchmarks.sleep MODEL`.

Measures the resident memory of this process in /proc while an engine runs with a filled KV pool,
and while it sleeps. Without MODEL: Qwen3-0.6B's shape with made-up weights, and fewer tokens.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.training.memory import HeldWeights

_MIB = 2**20
_LEAST = 0.9
"""Share of weights and used pages that sleep must release."""
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 0,
}


class Measured(NamedTuple):
    """Bytes; resident memory that belongs to no file."""

    weights: int
    pages: int
    """Bytes of the KV pool that requests have used."""
    awake: int
    asleep: int
    same_tokens: bool
    """Whether the engine gave the same tokens when it was awake again; True after level 2, which
    forgets the weights."""

    @property
    def share(self) -> float:
        """Return the share of weights and used pages that was released."""
        return (self.awake - self.asleep) / (self.weights + self.pages)


def dummy_checkpoint(path: Path, num_layers: int) -> str:
    """Write a config.json with `num_layers`, for load_format="dummy"; return `path`."""
    config = _CONFIG | {"num_hidden_layers": num_layers}
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def measure(model: str, *, level: int = 1, **options: Any) -> Measured:
    """Fill a part of the pool of a new engine, and let it sleep.

    Args:
        options: of `LLM`.
    """
    llm = LLM(model, device="cpu", max_model_len=1024, num_kvcache_blocks=256, **options)
    prompts = [[(7 * row + place) % 8000 for place in range(500)] for row in range(4)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def tokens() -> list[list[int]]:
        return [each.token_ids for each in llm.generate(prompts, params, use_tqdm=False)]

    before = tokens()
    network = llm.engine.executor._runner.network  # type: ignore[attr-defined]
    weights, block_size = HeldWeights([network.model]).num_bytes, network.backend.block_size
    pages = sum(-(-(len(prompt) + 8) // block_size) for prompt in prompts) * network.block_bytes
    awake = _resident()
    llm.sleep(level=level)
    asleep = _resident()
    same = True
    if level == 1:
        llm.wake_up()
        same = tokens() == before
    llm.shutdown()
    return Measured(weights, pages, awake, asleep, same)


def _resident() -> int:
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024


def main() -> int:
    """Return 0 if sleep gives back enough, and the tokens are the same afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--level", type=int, default=1)
    parser.add_argument("--quantization")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"quantization": args.quantization}
    model = args.model
    if model is None:
        options["load_format"] = "dummy"
        model = dummy_checkpoint(Path(tempfile.mkdtemp()), num_layers=28)
    found = measure(model, level=args.level, **options)
    print(f"weights {found.weights / _MIB:.0f} MiB, used pages {found.pages / _MIB:.0f} MiB")
    print(f"resident: {found.awake / _MIB:.0f} MiB awake, {found.asleep / _MIB:.0f} MiB asleep")
    print(f"given back: {found.share:.1%}; the same tokens afterwards: {found.same_tokens}")
    return 0 if found.share >= _LEAST and found.same_tokens else 1


if __name__ == "__main__":
    raise SystemExit(main())
