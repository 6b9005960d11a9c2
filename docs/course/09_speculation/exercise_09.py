"""Exercise 9: guess and check."""

import random
from collections.abc import Callable

Model = Callable[[list[int], list[int]], list[int]]
Proposer = Callable[[list[int]], list[int]]


def speculate(model: Model, propose: Proposer, token_ids: list[int], num_tokens: int) -> list[int]:
    """Return the `num_tokens` tokens that the model gives after a prompt.

    In each step, ask the proposer for guesses, let the model check them with one call, and append
    the tokens that are certain then: the model's own tokens up to and with the first one that was
    not guessed. If all guesses are right, the model's token after the last one is certain, too.

    Args:
        model: takes (all tokens so far, guesses) and returns its own tokens: the one after
            `all tokens so far`, then the one after each guess, as if the guesses before it were
            right. So it returns one token more than there are guesses. Calls of it are expensive.
        propose: takes all tokens so far and returns guesses, perhaps none.
        token_ids: the prompt. Leave this list as it is.
        num_tokens: the last step may give more tokens than that: drop those.
    """
    raise NotImplementedError("write speculate")


def check(speculate: Callable[..., list[int]]) -> None:
    """Raise AssertionError if `speculate` does not do what its docstring says."""
    calls: list[tuple[list[int], list[int]]] = []

    def after(token_ids: list[int]) -> int:  # a model that depends on the last two tokens
        return (7 * token_ids[-1] + 3 * sum(token_ids[-2:]) + len(token_ids) % 3) % 50

    def model(token_ids: list[int], guesses: list[int]) -> list[int]:
        calls.append((list(token_ids), list(guesses)))
        assert len(calls) <= 100, "100 calls of the model give no 30 tokens: does each give one?"
        return [after([*token_ids, *guesses[:known]]) for known in range(len(guesses) + 1)]

    alone = [3, 1]
    for _ in range(40):
        alone.append(after(alone))
    for name, num_right, num_calls in (
        ("no guesses", None, 30),
        ("guesses that are all wrong", 0, 30),
        ("4 guesses, of which 2 are right", 2, 10),
        ("4 guesses, all right", 4, 6),
    ):

        def propose(token_ids: list[int], num_right: int | None = num_right) -> list[int]:
            if num_right is None:
                return []
            start = len(token_ids)
            right = alone[start : start + num_right]
            return right + [60] * (4 - len(right))  # 60 is never a token

        calls.clear()
        prompt = [3, 1]
        found = speculate(model, propose, prompt, 30)
        assert prompt == [3, 1], f"the prompt was changed to {prompt}"
        assert found == alone[2:32], f"{name}: {found}, but without guesses {alone[2:32]}"
        assert len(calls) == num_calls, f"{name}: {len(calls)} calls, {num_calls} are enough"

    chance = random.Random(0)
    for _ in range(100):
        calls.clear()
        num_tokens = chance.randrange(1, 30)
        found = speculate(model, lambda ids: alone[len(ids) :][: chance.randrange(4)], [3, 1], 20)
        assert found == alone[2:22], f"guesses of random number: {found}, not {alone[2:22]}"
        found = speculate(model, lambda _: [chance.randrange(50)] * 3, [3, 1], num_tokens)
        assert found == alone[2 : 2 + num_tokens], f"random guesses change the tokens: {found}"


if __name__ == "__main__":
    check(speculate)
    print("solved")
