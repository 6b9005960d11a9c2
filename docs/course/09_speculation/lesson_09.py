"""Lesson 9: a small model guesses, and the large one checks several guesses in one step."""

from typing import Any, NamedTuple

from nanovllm import LLM, SamplingParams, demo_model

PROMPT = "Preemption happens when"
NUM_DRAFTS = 4
NUM_TOKENS = 24


class Step(NamedTuple):
    """One call of the model: what was guessed, and the tokens that it gave."""

    drafts: list[int]
    tokens: list[int]
    """The guesses that were right, and one token more."""


def make_llm(model: str, *, tokenizer: bool) -> LLM:
    """Return a model; the small one has no tokenizer, as it reads the ids of the large one."""
    return LLM(
        model,
        device="cpu",
        dtype="float32",
        max_model_len=128,
        skip_tokenizer_init=not tokenizer,
    )


def propose(small: LLM, token_ids: list[int], count: int) -> list[int]:
    """Return what the small model takes for the next tokens."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    output = small.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)[0]
    return list(output.token_ids)


def choices(large: LLM, token_ids: list[int], drafts: list[int]) -> list[int]:
    """Return the model's own token at the place of each draft, and the one after the last draft.

    This is one step, as a prompt's tokens are computed in one step.
    """
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    known = {"prompt_token_ids": [*token_ids, *drafts]}
    output = large.generate(known, params, use_tqdm=False)[0]
    assert output.prompt_logprobs is not None
    found = []
    for position in output.prompt_logprobs[len(token_ids) :]:
        likely: Any = position
        found.append(next(token for token, item in likely.items() if item.rank == 1))
    return [*found, *output.token_ids]


def accept(drafts: list[int], chosen: list[int]) -> list[int]:
    """Return the tokens of a step: the model's own, up to the first that was not guessed."""
    for number, draft in enumerate(drafts):
        if draft != chosen[number]:
            return chosen[: number + 1]
    return chosen


def run(large: LLM, small: LLM, token_ids: list[int], num_tokens: int) -> list[Step]:
    """Return the steps that give `num_tokens` tokens or a few more."""
    steps: list[Step] = []
    text = list(token_ids)
    while len(text) < len(token_ids) + num_tokens:
        drafts = propose(small, text, NUM_DRAFTS)
        tokens = accept(drafts, choices(large, text, drafts))
        steps.append(Step(drafts, tokens))
        text += tokens
    return steps


def main() -> None:
    large = make_llm(demo_model.MODEL, tokenizer=True)
    small = make_llm(demo_model.DRAFT_MODEL, tokenizer=False)
    tokenizer: Any = large.get_tokenizer()
    token_ids = tokenizer.encode(PROMPT)
    steps = run(large, small, token_ids, NUM_TOKENS)
    for number, (drafts, tokens) in enumerate(steps):
        guessed = "|".join(tokenizer.decode([token]) for token in drafts)
        new = tokenizer.decode(tokens[-1:])
        print(f"step {number}: guesses {guessed!r}, {len(tokens) - 1} right, then {new!r}")

    tokens = [token for step in steps for token in step.tokens]
    params = SamplingParams(temperature=0, max_tokens=len(tokens), ignore_eos=True)
    alone = large.generate(PROMPT, params, use_tqdm=False)[0]
    print(
        f"{len(tokens)} tokens in {len(steps)} steps; alone the same: {tokens == alone.token_ids}"
    )
    print(repr(tokenizer.decode(tokens)))


if __name__ == "__main__":
    main()
