"""Exercise 2: from logits to the probabilities that a token is drawn with."""

import math
from collections.abc import Callable
from typing import Any

from nanovllm import LLM, SamplingParams, demo_model


def probabilities(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Return the probability of each token, in the order of `logits`.

    1. Divide the logits by the temperature, which is above 0.
    2. Keep the `top_k` largest; 0 keeps all. The others get probability 0.
    3. Softmax: the weight of a token is exp(logit), its probability its share of all weights.
       (Subtract the largest logit first, or exp of a large one overflows.)
    4. Go through the tokens from the most likely on, and keep each until those kept reach `top_p`
       together; the token that reaches it is kept, too. The others get probability 0, and what is
       left is divided by its sum, so that the probabilities are again 1 together.
    """
    raise NotImplementedError("write probabilities")


def check(probabilities: Callable[..., list[float]]) -> None:
    """Raise AssertionError if `probabilities` does not do what its docstring says."""
    logits = [math.log(share) for share in (0.1, 0.4, 0.2, 0.3)]
    wanted: list[float]
    for temperature, top_k, top_p, wanted in (
        (1.0, 0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (0.5, 0, 1.0, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (1.0, 2, 1.0, [0, 4 / 7, 0, 3 / 7]),
        (1.0, 0, 0.5, [0, 4 / 7, 0, 3 / 7]),
        (1.0, 0, 0.75, [0, 4 / 9, 2 / 9, 3 / 9]),
        (1.0, 1, 0.1, [0.0, 1.0, 0.0, 0.0]),
        (1.0, 2, 0.5, [0.0, 1.0, 0.0, 0.0]),  # of the 2 that are left, one has 4 / 7
    ):
        found = probabilities(list(logits), temperature, top_k, top_p)
        case = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
        assert close(found, wanted), f"logs of 0.1, 0.4, 0.2, 0.3, {case}: {found}, not {wanted}"
    found = probabilities([1000.0, 1000.0], 1.0, 0, 1.0)
    assert close(found, [0.5, 0.5]), f"two logits of 1000: {found}, not [0.5, 0.5]"
    found = probabilities([0.0] * 4, 1.0, 0, 0.5)
    exact = "four equal logits, top_p 0.5: the second reaches it, so two of them get 0.5"
    assert close(sorted(found), [0, 0, 0.5, 0.5]), f"{exact}; got {found}"

    logits, wanted = engine_probabilities(temperature=1.3, top_k=5, top_p=0.8)
    found = probabilities(logits, 1.3, 5, 0.8)
    mine, engine = (
        {token: round(share, 4) for token, share in enumerate(shares) if share}
        for shares in (found, wanted)
    )
    assert close(found, wanted), f"after 'Chunked', by token: {mine}, the engine {engine}"


def close(found: list[float], wanted: list[float]) -> bool:
    """Return whether two lists of numbers are equal but for rounding."""
    return (
        isinstance(found, list)
        and len(found) == len(wanted)
        and all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(found, wanted, strict=True))
    )


def engine_probabilities(**setting: Any) -> tuple[list[float], list[float]]:
    """Return the logits of the token after 'Chunked', and the probabilities of a draw."""
    rows = []
    for mode in ("raw_logits", "processed_logprobs"):
        llm = LLM(
            demo_model.MODEL,
            device="cpu",
            dtype="float32",
            max_model_len=128,
            max_logprobs=-1,
            logprobs_mode=mode,
        )
        params = SamplingParams(max_tokens=1, logprobs=-1, **setting)
        output = llm.generate("Chunked", params, use_tqdm=False)[0].outputs[0]
        assert output.logprobs is not None
        rows.append({token: item.logprob for token, item in output.logprobs[0].items()})
    tokens = sorted(rows[0])
    return [rows[0][t] for t in tokens], [math.exp(rows[1].get(t, -math.inf)) for t in tokens]


if __name__ == "__main__":
    check(probabilities)
    print("solved")
