"""`nanovllm prove` with a model of each kind of layer and of weights.

    python -m tests.prove.each_layer -o docs/benchmarks/exactness/models.json [MODEL=WORDS ...]

Further models, each with words about its layers, are tried after the random ones.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import demo_model
from nanovllm.apps.prove.proof import Prover, Verdict
from nanovllm.apps.prove.prove_options import ProveOptions
from tests.checkpoints import make_checkpoint
from tests.lora.adapters import linears_of, write_adapter
from tests.mtp_checkpoints import add_mtp
from tests.test_native_invariance import MODEL, OTHER_FAMILIES


class Case(NamedTuple):
    """A random model."""

    layers: str
    family: str
    quantization: str | None = None
    num_adapters: int = 0
    has_mtp: bool = False


CASES = [
    Case("full attention, q/k norms; int8 weights", "qwen3", "int8"),
    Case("full attention; int4 weights, two LoRA adapters", "llama", "int4", num_adapters=2),
    Case("full attention, biases; w8a8 weights", "qwen2", "w8a8"),
    Case("windows and full attention", "gemma3_text"),
    Case("windows, sinks, experts", "gpt_oss"),
    Case("experts", "qwen3_moe"),
    Case("gated delta rule and full attention; MTP layer", "qwen3_5_text", has_mtp=True),
    Case("gated delta rule, full attention, experts; int4 weights", "qwen3_5_moe_text", "int4"),
    Case("latent attention, experts; MTP layer", "glm4_moe_lite", has_mtp=True),
    Case("Kimi delta attention, latent attention, experts", "kimi_linear"),
    Case("Mamba-2, full attention, experts", "granitemoehybrid"),
    Case("Mamba-2 beside full attention", "falcon_h1"),
    Case("short convolutions and full attention", "lfm2"),
]


def models(directory: Path) -> Iterator[tuple[str, str, str, dict[str, Any], list[str]]]:
    """Yield (name, layers, model, options, adapters) of the shipped model and of each case."""
    yield "the shipped model", "full attention, q/k norms; trained", demo_model.MODEL, {}, []
    for case in CASES:
        tokens = {"eos_token_id": 7, "pad_token_id": 0, "bos_token_id": 1}
        config = {**MODEL, "model_type": case.family, **OTHER_FAMILIES.get(case.family, {})}
        if case.has_mtp:
            config["num_nextn_predict_layers"] = 1
        model = make_checkpoint(directory / case.family, **{**config, **tokens})
        if case.has_mtp:
            model, _ = add_mtp(directory / f"{case.family}-mtp", model)
        adapters = [
            f"a{seed}={write_adapter(directory / f'adapter-{seed}', linears_of(model), seed=seed)}"
            for seed in range(case.num_adapters)
        ]
        yield case.family, case.layers, model, {"quantization": case.quantization}, adapters


def show(verdict: Verdict) -> None:
    """Write a line on standard error."""
    sys.stderr.write(f"  {verdict.setting} {verdict.way}: {verdict.status}, {verdict.evidence}\n")


def main() -> int:
    """Try all models; write a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("more", metavar="MODEL=WORDS", nargs="*")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--num-requests", type=int, default=12)
    args = parser.parse_args()
    lines = []
    holds = True
    with tempfile.TemporaryDirectory() as directory:
        more = [each.partition("=") for each in args.more]
        given = [(Path(path).name, layers, path, {}, []) for path, _, layers in more]
        for name, layers, model, options, adapters in [*models(Path(directory)), *given]:
            sys.stderr.write(f"{name}\n")
            script = f"reproduction-{name}.py"
            prove = ProveOptions(
                num_requests=args.num_requests, reproduction=script, lora_modules=adapters
            )
            proof = Prover(model, options, prove, show).prove()
            holds &= proof.holds
            found = {**dataclasses.asdict(proof), "model": name, "layers": layers}
            lines.append(json.dumps(found | {"options": options}))
            args.output.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
