"""Part `smoke`: greedy tokens of the engine, made in nine ways, against a float64 forward pass.

The model has random weights in the shape of Qwen3-0.6B. transformers computes the same sequences in
float64, and in bfloat16 as a yardstick. A token's regret is how far its float64 logit is below the
largest. At last a fault is planted in the reference, which must show.
"""

import copy
import functools
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import QWEN3_06B
from benchmarks.gpu.part import Part, Record, table


class Way(NamedTuple):
    """How the engine is built, and how many prompts it gets at once."""

    name: str
    at_once: tuple[int, ...]
    options: Mapping[str, Any]


WAYS = (
    Way("bfloat16", (24, 16, 8, 4, 1), {"dtype": "bfloat16"}),
    Way("kernel by kernel", (24,), {"dtype": "bfloat16", "enforce_eager": True}),
    Way("plain torch", (24,), {"dtype": "bfloat16", "native_kernels": False}),
    Way("float32", (24, 1), {"dtype": "float32"}),
)
"""The first are steps by graphs, those of up to 16 rows by fused kernels where these are faster."""
SHAPE = {**QWEN3_06B, "tie_word_embeddings": False}
"""Of the model. Tied, random embeddings would find the last token again."""
_LONGEST = 700
_NEW_TOKENS = 40
_LIMITS = {"bfloat16": 3.0, "float32": 1.0}
"""How many times the regret of transformers' bfloat16 is right."""
_CONTROL = 20
"""How many times the largest mean regret that of a wrong reference must be."""

Tokens = list[list[int]]


def smoke(record: Record) -> None:
    """Check the engine on the GPU.

    Raises:
        RuntimeError: the Triton kernels are off, so nothing else of a call would mean anything.
    """
    from nanovllm.platform.cuda import triton_available

    if not triton_available():
        record.figures["off"] = True
        record.save()
        raise RuntimeError("the Triton kernels are off")
    compare(record, SHAPE, _LONGEST, "cuda")


def compare(record: Record, shape: Mapping[str, Any], longest: int, device: str) -> None:
    """Generate in each way, and compare with float64.

    Args:
        shape: the model's config.
        longest: tokens of the longest prompt.
    """
    import torch

    folder = record.scratch / "smoke"
    model = write_checkpoint(folder, shape, device)
    prompts = make_prompts(longest, shape["vocab_size"])
    found: dict[tuple[str, int], Tokens] = {}
    for way in WAYS:
        work = functools.partial(generate, folder, way, prompts, found, device)
        record.attempt("engines", {"way": way.name}, work)
    exact = copy.deepcopy(model).double()
    judge = Judge(exact, model, device)
    first = found.get((WAYS[0].name, len(prompts)), [])
    for (name, at_once), tokens in found.items():
        row = judge.row(prompts, tokens, _LIMITS.get(name, _LIMITS["bfloat16"]))
        same = sum(ours == theirs for ours, theirs in zip(tokens, first, strict=False))
        record.add("judged", {"way": name, "at_once": at_once, **row, "same": same})
    weight = exact.model.layers[0].self_attn.v_proj.weight
    with torch.no_grad():
        weight[: len(weight) // 8].neg_()
    wrong = Judge(exact, model, device).row(prompts, first, _LIMITS["bfloat16"])
    largest = max((row["mean"] for row in record.figures["judged"]), default=0.0)
    seen = wrong["mean"] > _CONTROL * max(largest, 1e-6)
    record.figures["control"] = {"mean": wrong["mean"], "worst": wrong["worst"], "seen": seen}
    record.save()
    bad = [row for row in record.figures["judged"] if not row["right"]]
    failed = [row for row in record.figures["engines"] if "error" in row]
    if bad or failed or not seen:
        raise RuntimeError(f"{len(bad)} ways are wrong, {len(failed)} failed; control: {seen}")


def write_checkpoint(folder: Path, shape: Mapping[str, Any], device: str) -> Any:
    """Write a checkpoint with random weights; return it as transformers' model in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            if weight.ndim == 1:  # norms that matter
                weight.copy_(1 + 0.1 * noise)
            else:
                own = {"embed": 1.0, "lm_head": 0.05}
                scales = (scale for part, scale in own.items() if part in name)
                weight.copy_(noise * next(scales, weight.shape[1] ** -0.5))
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape))
    return model


def make_prompts(longest: int, vocab_size: int) -> Tokens:
    """Return 24 random prompts; some lengths lie at the borders of tiles and blocks."""
    rng = random.Random(1)
    lengths = [1, 2, 63, 64, 65, 127, 129, longest // 2, longest]
    lengths += [rng.randint(1, longest) for _ in range(15)]
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def generate(
    folder: Path, way: Way, prompts: Tokens, found: dict[tuple[str, int], Tokens], device: str
) -> dict[str, Any]:
    """Add the tokens of a way to `found`, for each number of prompts at once; return seconds."""
    from nanovllm import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=_NEW_TOKENS, ignore_eos=True)
    longest = max(map(len, prompts))
    start = time.perf_counter()
    llm = LLM(
        str(folder),
        device=device,
        enable_prefix_caching=False,
        max_model_len=longest + 2 * _NEW_TOKENS,
        max_num_seqs=32,
        num_kvcache_blocks=500,
        skip_tokenizer_init=True,
        **way.options,
    )
    seconds = {"start": time.perf_counter() - start}
    for at_once in way.at_once:
        start = time.perf_counter()
        some = prompts if at_once > 1 else prompts[:6]
        tokens: Tokens = []
        for index in range(0, len(some), at_once):
            outputs = llm.generate(some[index : index + at_once], params, use_tqdm=False)
            tokens += [list(output.outputs[0].token_ids) for output in outputs]
        found[way.name, at_once] = tokens
        seconds[str(at_once)] = time.perf_counter() - start
    llm.shutdown()
    return seconds


class Judge:
    """Computes regrets; keeps the logits of a sequence that several ways have generated.

    Args:
        exact: the reference in float64.
        rounded: the same model in bfloat16.
    """

    def __init__(self, exact: Any, rounded: Any, device: str) -> None:
        self._models = exact, rounded
        self._device = device
        self._known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def row(self, prompts: Tokens, tokens: Tokens, limit: float) -> dict[str, Any]:
        """Return the mean and the worst regret, those of the model in bfloat16, and a verdict."""
        import torch

        regrets: list[float] = []
        yardstick: list[float] = []
        for prompt, new in zip(prompts, tokens, strict=False):
            exact, rounded = self._logits(prompt, new)
            best = exact.max(1).values
            own = torch.tensor(new, device=exact.device)[:, None]
            regrets += (best - exact.gather(1, own)[:, 0]).tolist()
            theirs = rounded.argmax(1)[:, None]
            yardstick += (best - exact.gather(1, theirs)[:, 0]).tolist()
        count = max(len(regrets), 1)
        mean = sum(regrets) / count
        their_mean = sum(yardstick) / count
        worst = max(regrets, default=0.0)
        their_worst = max(yardstick, default=0.0)
        right = mean <= limit * max(their_mean, 1e-4) and worst <= limit * max(their_worst, 1e-3)
        return {
            "tokens": len(regrets),
            "mean": mean,
            "worst": worst,
            "their_mean": their_mean,
            "their_worst": their_worst,
            "right": bool(regrets) and right,
        }

    def _logits(self, prompt: Sequence[int], new: Sequence[int]) -> tuple[Any, Any]:
        """Return the logits [new tokens, vocab] of both models, from which `new` were chosen."""
        import torch

        sequence = (*prompt, *new)
        if sequence not in self._known:
            ids = torch.tensor([sequence[:-1]], device=self._device)
            with torch.no_grad():
                exact, rounded = (
                    model(ids, logits_to_keep=len(new), use_cache=False).logits[0].double()
                    for model in self._models
                )
            self._known[sequence] = exact, rounded
        return self._known[sequence]


def lines(figures: Mapping[str, Any], bandwidth: Mapping[str, Any]) -> list[str]:
    """Return a table of regrets, and whether the planted fault was seen."""
    if figures.get("off"):
        return ["The Triton kernels are off: see the log."]
    head = ["way", "prompts at once", "tokens", "mean regret", "worst", "transformers in bfloat16"]
    rows = [
        [
            row["way"],
            row["at_once"],
            row["tokens"],
            f"{row['mean']:.5f}",
            f"{row['worst']:.4f}",
            f"{row['their_mean']:.5f}, {row['their_worst']:.4f}",
            row["same"],
            "right" if row["right"] else "WRONG",
        ]
        for row in figures["judged"]
    ]
    text = table([*head, "sequences as in the first", "verdict"], rows)
    failed = [row for row in figures["engines"] if "error" in row]
    text += ["", *(f"- {row['way']}: {row['error']}" for row in failed)]
    control = figures["control"]
    verdict = "seen" if control["seen"] else "NOT SEEN"
    return [
        *text,
        "",
        f"With an eighth of a layer's values negated in the reference the mean regret is "
        f"{control['mean']:.4f}, the worst {control['worst']:.3f}: the fault is {verdict}.",
    ]


PART = Part(smoke, 110, "Tokens against float64", lines)
