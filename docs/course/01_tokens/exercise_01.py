"""Exercise 1: the loop that every language model runs in."""

from collections.abc import Callable
from typing import Any

from nanovllm import LLM, SamplingParams, demo_model


def generate(
    next_logits: Callable[[list[int]], list[float]],
    token_ids: list[int],
    max_tokens: int,
    end: int,
) -> list[int]:
    """Return the tokens that follow a prompt, each time the one with the largest logit.

    Args:
        next_logits: the model. It takes all tokens so far, the prompt's first, and returns a number
            for each token of the vocabulary: the logit of token 7 is at index 7.
        token_ids: the prompt. Leave this list as it is.
        max_tokens: stop after this many new tokens.
        end: the token that says "the text ends here". It is the last one if it comes; nothing is
            computed after it.

    Returns:
        The new tokens, without the prompt.
    """
    raise NotImplementedError("write generate")


def check(generate: Callable[..., list[int]]) -> None:
    """Raise AssertionError if `generate` does not do what its docstring says."""
    calls: list[list[int]] = []

    def counting(token_ids: list[int]) -> list[float]:  # a model that counts up to 9
        calls.append(list(token_ids))
        return [-abs(token - token_ids[-1] - 1.0) for token in range(10)]

    prompt = [3, 4]
    found = generate(counting, prompt, 3, 9)
    assert found == [5, 6, 7], f"a model that counts, prompt [3, 4], 3 tokens: got {found}"
    assert prompt == [3, 4], f"the prompt was changed to {prompt}"
    wanted = [[3, 4], [3, 4, 5], [3, 4, 5, 6]]
    assert calls == wanted, f"the model was asked about {calls}, and should be asked about {wanted}"
    found = generate(counting, [6], 100, 9)
    assert found == [7, 8, 9], f"token 9 ends the text: got {found} after [6]"

    llm = LLM(demo_model.MODEL, device="cpu", dtype="float32", max_model_len=128)
    greedy = SamplingParams(temperature=0, max_tokens=5)
    output = llm.generate("A KV cache is", greedy, use_tqdm=False)[0]
    found = generate(shipped_model(llm), output.prompt_token_ids, 5, 1021)
    assert found == output.token_ids, f"the engine generates {output.token_ids}, you {found}"


def shipped_model(llm: LLM) -> Callable[[list[int]], list[float]]:
    """Return the shipped model as a function from token ids to logits, as in the lesson."""

    def next_logits(token_ids: list[int]) -> list[float]:
        seen: list[list[float]] = []

        def look(output: list[int], logits: Any) -> Any:
            seen.append(logits.tolist())  # `output` has the tokens drawn so far: none here
            return logits

        params = SamplingParams(temperature=0, max_tokens=1, logits_processors=[look])
        llm.generate({"prompt_token_ids": token_ids}, params, use_tqdm=False)
        return seen[0]

    return next_logits


if __name__ == "__main__":
    check(generate)
    print("solved")
