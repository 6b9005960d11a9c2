"""What speculation gains on real text: SmolLM2-135M-Instruct and the shipped model.

SmolLM2, with n-gram drafts, edits, quotes and summarises passages from this repository's docs, and
answers open questions. The shipped model answers questions from its glossary with each method.
Every request runs alone, without and with speculation in turn; the tokens must be the same.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Table, make_parser
from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.outputs import DraftCounts

DOCS = Path(__file__).parent.parent / "docs"
PAGES = ("architecture.md", "scheduler.md", "paged_attention.md", "generation.md", "security.md")
CHAT = (
    "What should I cook for dinner tonight?",
    "Tell me a short story about a fisherman and a lighthouse.",
    "Explain why the sky is blue.",
    "Write a poem about autumn.",
    "How can I learn to play the guitar?",
    "What are the advantages of living in a small town?",
    "Give me three ideas for a birthday present.",
    "Describe a walk in the forest.",
)


def passages(number: int) -> list[str]:
    """Return paragraphs of the docs, 50 to 120 words each."""
    found = []
    for page in PAGES:
        for paragraph in (DOCS / page).read_text(encoding="utf-8").split("\n\n"):
            plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
            plain = plain.replace("`", "").replace("**", "")
            if 50 <= len(plain.split()) <= 120 and not re.search(r"[|#<>{]", plain):
                found.append(plain)
    return random.Random(0).sample(sorted(found), min(number, len(found)))


def tasks() -> Iterator[tuple[str, list[str]]]:
    """Yield SmolLM2's tasks: a name and the user's messages."""
    texts = passages(8)
    assert texts, "the docs have no passages of the right length"
    yield (
        "editing",
        [
            "Copy the following text and correct the spelling mistakes. Change nothing else.\n\n"
            + misspelt(text)
            for text in texts
        ],
    )
    yield "quoting", [f"Quote the following text word for word.\n\n{text}" for text in texts]
    yield "summarising", [f"Summarise the following text.\n\n{text}" for text in texts]
    yield "open chat", list(CHAT)


def misspelt(text: str) -> str:
    """Return `text` with two letters exchanged in every twelfth word."""
    words = text.split()
    for index in range(5, len(words), 12):
        word = words[index]
        if len(word) > 4:
            words[index] = word[0] + word[2] + word[1] + word[3:]
    return " ".join(words)


def run(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[float, list[int], DraftCounts]:
    """Return the seconds from the first token to the last one, the output and its drafts."""
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.last_token_time is not None
    seconds = metrics.last_token_time - metrics.first_token_time
    return seconds, output.outputs[0].token_ids, metrics.drafts


def compare(
    table: Table, name: str, engines: tuple[LLM, LLM], messages: list[str], args: Any
) -> None:
    """Add to the table the speed-up of the second engine over the first one, and its acceptance."""
    for temperature in args.temperature:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=args.output_len)
        ratios: list[float] = []
        counts, num_tokens, same = DraftCounts(), 0, 0
        for round_ in range(args.rounds + 1):  # the first one warms up
            seconds = [0.0, 0.0]
            for message in messages:
                conversation = [{"role": "user", "content": message}]
                prompt = engines[0].render(conversation, add_generation_prompt=True)
                found = [run(llm, prompt, params) for llm in engines]
                seconds = [total + one[0] for total, one in zip(seconds, found, strict=True)]
                if round_ == 0:
                    num_tokens += len(found[1][1])
                    same += found[0][1] == found[1][1]
                    counts += found[1][2]
            if round_:
                ratios.append(seconds[0] / seconds[1])
        table.row(
            name,
            temperature,
            median(ratios),
            f"{min(ratios):.2f} to {max(ratios):.2f}",
            num_tokens / (num_tokens - counts.num_accepted_tokens),
            counts.mean_acceptance_length,
            f"{counts.num_accepted_tokens} of {counts.num_draft_tokens}",
            f"{same} of {len(messages)}",
        )


def main() -> None:
    """Compare the engines on each task."""
    parser = make_parser("speculation_text", __doc__, model=False)
    parser.add_argument("--output-len", type=int, default=160)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--questions", type=int, default=24, help="of the shipped model's glossary")
    args = parser.parse_args()
    headings = "task", "temperature", "times as fast", "rounds", "tokens a step"
    table = Table(*headings, "where drafts were", "drafts accepted", "same tokens")
    smollm2 = demo_model.smollm2()
    options: dict[str, Any] = {"enable_prefix_caching": False, "max_model_len": 2048}
    for quantization, words in (("none", "bfloat16"), (None, "4 bits")) if smollm2 else ():
        assert smollm2 is not None
        engines = tuple(
            LLM(smollm2, quantization=quantization, speculative_config=spec, **options)
            for spec in (None, {"method": "ngram"})
        )
        for name, messages in tasks():
            compare(table, f"{name}, {words}", engines, messages, args)  # type: ignore[arg-type]
        for llm in engines:
            llm.shutdown()
    questions = [question for question, _ in demo_model.entries()][::4][: args.questions]
    plain = LLM(demo_model.MODEL, **options)
    for spec in (
        {"method": "ngram"},
        {"method": "draft_model", "model": demo_model.DRAFT_MODEL},
        {"method": "eagle3", "model": demo_model.EAGLE3},
    ):
        drafting = LLM(demo_model.MODEL, speculative_config=spec, **options)
        compare(table, f"glossary, {spec['method']}", (plain, drafting), questions, args)
        drafting.shutdown()


if __name__ == "__main__":
    main()
