"""The requests that `nanovllm prove` compares, and the bits of their answers.

Prompts share beginnings of many lengths; some are equal. Parameters are of all kinds.
"""

import hashlib
import random
import struct
from collections.abc import Callable, Mapping, Sequence as Seq
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm import demo_model
from nanovllm.outputs import Logprob, RequestOutput

if TYPE_CHECKING:
    import numpy as np

PICTURE_SIDES = (96, 64)
"""Height and width of a request's picture."""
MAX_TOKENS = 48
"""Most tokens of an answer; long requests have more."""
Values = tuple[tuple[tuple[int, float], ...], ...]
"""At each position, (token, log-probability) of some tokens, the chosen one first."""


class ProofRequest(NamedTuple):
    """A prompt and its sampling parameters, as values that JSON has."""

    prompt: list[int]
    params: dict[str, Any]
    adapter: int | None = None
    """Index of its LoRA adapter; None: the model alone."""
    pictures: Seq[int] = ()
    """Seeds of its pictures, each of which has a soft token in the prompt."""

    @property
    def given(self) -> Any:
        """The prompt as `LLM.generate` takes it."""
        if not self.pictures:
            return self.prompt
        found = [_picture(seed) for seed in self.pictures]
        return {"prompt_token_ids": self.prompt, "multi_modal_data": {"image": found}}


class PictureSize(NamedTuple):
    """What a picture is in a prompt."""

    token: int  # the soft token that stands for one
    num_tokens: int


def _picture(seed: int) -> "np.ndarray[Any, Any]":
    """Return a picture of random colours."""
    import numpy as np

    shape = (*PICTURE_SIDES, 3)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Bits(NamedTuple):
    """All of an answer that must not depend on how it was computed."""

    token_ids: tuple[int, ...]
    logprobs: Values
    prompt_logprobs: Values

    @property
    def digest(self) -> str:
        """SHA-256 of tokens and log-probabilities: two answers have the same if all bits agree."""
        found = hashlib.sha256(struct.pack(f"<{len(self.token_ids)}q", *self.token_ids))
        for values in (self.logprobs, self.prompt_logprobs):
            found.update(struct.pack("<q", len(values)))
            for position in values:
                for token, value in position:
                    found.update(struct.pack("<qd", token, value))
        return found.hexdigest()


def bits_of(output: RequestOutput) -> Bits:
    """Return the bits of an answer."""
    completion = output.outputs[0]
    return Bits(
        tuple(completion.token_ids),
        _values(completion.logprobs or ()),
        _values([found or {} for found in output.prompt_logprobs or ()]),
    )


def _values(found: Seq[Mapping[int, Logprob]]) -> Values:
    return tuple(tuple((token, entry.logprob) for token, entry in at.items()) for at in found)


class Workload(NamedTuple):
    """Requests, and the indices of each kind of them."""

    requests: list[ProofRequest]
    usual: tuple[int, ...]
    halves: tuple[int, ...]
    """Of those whose prompt is half of another one's."""
    long: tuple[int, ...]
    """Of those with answers so long that they preempt each other."""


def make_workload(
    count: int,
    vocab_size: int,
    block_size: int,
    longest: int,
    encode: Callable[[str], list[int]] | None = None,
    *,
    num_adapters: int = 0,
    picture: PictureSize | None = None,
) -> Workload:
    """Return `count` usual requests, halves of some, and long ones: the same in each process.

    Args:
        longest: tokens of a prompt and its answer together.
        encode: the model's tokenizer; prompts are then pieces of English. None: random tokens.
        num_adapters: which the requests have in turn, after the model alone.
        picture: of which every third request has one or two, some the same; None: none has.
    """
    rng = random.Random(0)
    most = longest - min(MAX_TOKENS, longest // 2)
    text = _text(encode, vocab_size, rng, most)
    starts = [0, 7, block_size // 2 + 1, block_size, 3 * block_size // 2, 2 * block_size, most]
    usual: list[ProofRequest] = []
    for index in range(count):
        start = min(rng.choice(starts), most - 1)
        # The window is somewhere in the text, so prompts with an equal start go on differently.
        place = rng.randrange(len(text))
        own = (text[place:] + text)[: rng.randint(1, max(1, min(60, most - start)))]
        prompt = text[:start] + own
        if index % 9 == 8:
            prompt = list(usual[-1].prompt)
        seeds: list[int] = []
        extra = 0
        if picture is not None and index % 3 == 1 and 2 * picture.num_tokens < most:
            seeds = [index % 2, 2][: 1 + index % 2]
            extra = len(seeds) * picture.num_tokens
            prompt = prompt[: most - extra]
            for place in (len(prompt) // 3, len(prompt) + 1)[: len(seeds)]:
                prompt.insert(place, picture.token)
        room = min(longest - len(prompt) - extra, MAX_TOKENS)
        params = _params(index, rng, vocab_size, room)
        usual.append(ProofRequest(prompt, params, _adapter(index // 2, num_adapters), seeds))
    params = {"temperature": 0.0, "max_tokens": 1, "logprobs": 2}
    halves = [
        ProofRequest(each.prompt[: len(each.prompt) // 2], params, each.adapter)
        for each in usual
        if len(each.prompt) >= 2 * block_size and not each.pictures
    ]
    long = []
    for index, params in enumerate(_long_params(rng, vocab_size)):
        length = 1 + index * min(block_size, most) // 4
        params |= {"max_tokens": longest - length, "ignore_eos": True, "logprobs": 2}
        long.append(ProofRequest(text[-length:], params, _adapter(index, num_adapters)))
    places = iter(range(count + len(halves) + len(long)))
    indices = (tuple(islice(places, len(kind))) for kind in (usual, halves, long))
    return Workload([*usual, *halves, *long], *indices)


def _adapter(turn: int, num_adapters: int) -> int | None:
    turn %= num_adapters + 1
    return turn - 1 if turn else None


def _long_params(rng: random.Random, vocab_size: int) -> list[dict[str, Any]]:
    few = rng.sample(range(vocab_size), min(3, vocab_size))
    return [
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "seed": 1, "allowed_token_ids": few},
        {"temperature": 0.8, "seed": 2, "presence_penalty": 0.5},
    ]


def _params(index: int, rng: random.Random, vocab_size: int, room: int) -> dict[str, Any]:
    params: dict[str, Any] = {
        "temperature": 0.8 * (index % 2),
        "seed": index,
        "max_tokens": rng.randint(max(1, room // 4), room),
        "ignore_eos": index % 3 > 0,
        "logprobs": 2,
    }
    if index % 4 == 1:  # of few tokens n-grams repeat, so drafts are accepted
        params["allowed_token_ids"] = rng.sample(range(vocab_size), min(3, vocab_size))
    more: list[dict[str, Any]] = [
        {},
        {"top_k": 20},
        {"repetition_penalty": 1.2},
        {"top_p": 0.9},
        {},
        {"min_p": 0.05, "presence_penalty": 0.5},
        {"prompt_logprobs": 1},
    ]
    return params | more[index % len(more)]


def _text(
    encode: Callable[[str], list[int]] | None, vocab_size: int, rng: random.Random, least: int
) -> list[int]:
    """Return `least` tokens or more."""
    if encode is None:
        return [rng.randrange(vocab_size) for _ in range(least)]
    found: list[int] = []
    for question, answer in demo_model.entries():
        if len(found) < least:
            found += encode(f"{question}\n{answer}\n\n")
    return found * (1 + least // len(found))
