"""The ways to compute the requests that `nanovllm prove` compares with each request alone.

A setting is what may change the bits, such as an int8 KV cache; each has a reference of its own. A
way is what may not.
"""

from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import demo_model
from nanovllm.kv.windows import pages_for
from nanovllm.scheduler.worker_info import WorkerInfo

ALONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
"""Options of a reference: one request after the other, whole prompts, no cache."""
_NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
_HOST_GIB = 0.25

Calls = tuple[tuple[int, ...], ...]
"""Of each call of `generate`: the indices of its requests."""


class Setting(NamedTuple):
    """Options that may change the bits."""

    name: str
    options: dict[str, Any]
    has_adapters: bool = False


class Way(NamedTuple):
    """Another way to compute the same requests."""

    name: str
    options: dict[str, Any]
    engines: tuple[Calls, ...]
    """The calls of each engine. There is one engine after the other."""
    evidence: str = "steps"
    """The count that must not be 0: otherwise nothing of what the way is about has happened."""
    elsewhere: bool = False
    """Whether the engine runs in a new process."""
    keeps_files: bool = False
    """Whether the engines share a new kv_cache_dir."""


class Shape(NamedTuple):
    """What the ways need to know of a model and of the requests."""

    num_requests: int
    halves: tuple[int, ...]
    """Indices of the requests that are halves of others' prompts."""
    longest_first: tuple[int, ...]
    """Indices of the requests, by the lengths of their answers: long ones preempt each other."""
    info: WorkerInfo
    drafts: dict[str, dict[str, Any]]
    """speculative_config of each kind of speculation that the model has."""

    @property
    def everything(self) -> tuple[int, ...]:
        return tuple(range(self.num_requests))

    def smallest_pool(self, chunk: int | None = None) -> int:
        """Return the number of KV blocks of a pool for one sequence of max_model_len; with states,
        of a second one's state, too: without it no other sequence would begin.
        """
        info = self.info
        chunk = chunk or info.max_num_batched_tokens
        pages = pages_for(info.max_model_len, info.block_size, info.windows, chunk)
        return pages + 2 * info.state_pages


def settings(options: dict[str, Any], *, has_adapters: bool, full: bool) -> list[Setting]:
    """Return the settings: the user's own `options`, and those with another KV cache or weights."""
    found = [Setting("", options)]
    if "kv_cache_dtype" not in options:
        found.append(Setting("int8 KV", {**options, "kv_cache_dtype": "int8"}))
    if has_adapters:
        found.append(Setting("LoRA", {**options, "enable_lora": True}, has_adapters=True))
    if full and options.get("quantization") is None:
        for form in ("int8", "int4"):
            found.append(Setting(f"{form} weights", {**options, "quantization": form}))
    return found


def drafts_of(model: str, options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the speculative_config of each kind of speculation to try, by name."""
    found = {"n-gram drafts": _NGRAM}
    if Path(model).resolve() == Path(demo_model.MODEL):
        found["a draft model"] = {"model": demo_model.DRAFT_MODEL, "num_speculative_tokens": 4}
        found["an EAGLE-3 head"] = {
            "method": "eagle3",
            "model": demo_model.EAGLE3,
            "num_speculative_tokens": 4,
        }
    found["MTP drafts"] = {"method": "mtp"}
    if (given := options.get("speculative_config")) is not None:
        found["the drafts given"] = given
    return found


def ways(setting: Setting, shape: Shape, *, full: bool) -> Iterator[Way]:
    """Yield the ways of a setting: all for the first, a few for each other one."""
    all_ = shape.everything
    once: tuple[Calls, ...] = ((all_,),)
    twice: tuple[Calls, ...] = ((all_, all_),)
    if setting.has_adapters:
        yield Way("adapters mixed", {"max_loras": 4}, twice)
        yield Way("adapters in turn", {"max_loras": 1}, once)
        yield Way("adapters, preempted", _tiny(shape), twice, "preemptions")
        return
    if setting.name:
        yield Way("batches of 64", {"max_num_seqs": 64, **_COLD}, once)
        yield Way("chunks of 17 tokens", {"max_num_batched_tokens": 17}, once)
        yield Way("warm", {}, twice, "cached tokens")
        yield Way("n-gram drafts", {"speculative_config": _NGRAM}, once, "accepted drafts")
        return
    yield from _batches(all_, full=full)
    yield Way("warm", {}, twice, "cached tokens")
    yield Way("half warm", {}, ((shape.halves, all_),), "cached tokens")
    yield Way("preempted", _tiny(shape), ((shape.longest_first,),), "preemptions")
    yield Way("call by call", {"enforce_eager": True}, once)
    for threads in (1, 2, 3, 4) if full else (1, 2):
        yield Way(f"{threads} CPU thread{'s' * (threads > 1)}", {"num_threads": threads}, once)
    for name, spec in shape.drafts.items():
        yield Way(name, {"speculative_config": spec}, once, "accepted drafts")
    chunk = 37
    small = {**_tiny(shape, chunk), "max_num_batched_tokens": chunk}
    mixed = {**small, "speculative_config": _NGRAM}
    both = (shape.longest_first, all_)
    yield Way("drafts, chunks, preempted", mixed, (both,), "preemptions")
    tiers = {**_tiny(shape), "kv_offload_gib": _HOST_GIB}
    yield Way("KV in host memory", tiers, twice, "tokens from host memory")
    # A page that is reused before it is written is never written: the first engine has room.
    yield Way("KV in files", {}, ((all_,), (all_,)), "tokens from files", keeps_files=True)
    yield Way("another process", {}, once, elsewhere=True)


_COLD: dict[str, Any] = {"enable_prefix_caching": False}


def _batches(all_: Seq[int], *, full: bool) -> Iterator[Way]:
    once: tuple[Calls, ...] = ((tuple(all_),),)
    for size in (2, 3, 5, 8, 16, 32, 64) if full else (2, 5, 64):
        yield Way(f"batches of {size}", {"max_num_seqs": size, **_COLD}, once)
    for chunk in (1, 7, 17, 64, 131) if full else (17,):
        few = tuple(all_[:4]) if chunk == 1 else tuple(all_)  # a step for each token
        options = {"max_num_batched_tokens": chunk, **_COLD}
        yield Way(f"chunks of {chunk} token{'s' * (chunk > 1)}", options, ((few,),))


def _tiny(shape: Shape, chunk: int | None = None) -> dict[str, Any]:
    return {"num_kvcache_blocks": shape.smallest_pool(chunk), "max_num_seqs": 8}
