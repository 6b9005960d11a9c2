"""The ways to compute the requests that `nanovllm prove` compares with each request alone.

A setting is what may change the bits, such as an int8 KV cache; each has a reference of its own. A
way is what may not.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm import demo_model
from nanovllm.apps.prove.requests import Workload
from nanovllm.core.worker_info import WorkerInfo, pages_for
from nanovllm.kv.groups.state import ROOM_TO_GROW

ALONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
"""Options of a reference: one request after the other, whole prompts, no cache."""
_NGRAM: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 4}
_HOST_GIB = 0.25
_CHUNK = 37
"""Most tokens of a step where the pool is small: a window then takes few pages."""

Calls = tuple[tuple[int, ...], ...]
"""Of each call of `generate`: the indices of its requests."""


class Setting(NamedTuple):
    """Options that may change the bits."""

    name: str
    options: dict[str, Any]


class Way(NamedTuple):
    """Another way to compute the same requests."""

    name: str
    options: dict[str, Any]
    engines: tuple[Calls, ...]
    """The calls of each engine. There is one engine after the other."""
    evidence: tuple[str, ...] = ("steps",)
    """The counts of which none may be 0: otherwise what the way is about has not happened."""
    elsewhere: bool = False
    """Whether the engine runs in a new process."""
    reloads: bool = False
    """Whether each adapter first has another one's weights, which its own replace."""
    keeps_files: bool = False
    """Whether the engines share a new kv_cache_dir."""


class Shape(NamedTuple):
    """What the ways need to know of a model and of the requests."""

    workload: Workload
    info: WorkerInfo
    num_adapters: int
    drafts: dict[str, dict[str, Any]]
    """speculative_config of each kind of speculation to try, by name."""

    @property
    def small_pool(self) -> dict[str, Any]:
        """Options of a pool in which long requests preempt each other: it has pages for one
        sequence of max_model_len. With states a second one begins only where it leaves the first
        one room to grow.
        """
        info = self.info
        pages = pages_for(info.max_model_len, info.block_size, info.kv.windows, _CHUNK)
        if info.kv.state_pages:
            num_blocks = -(-info.max_model_len // info.block_size)
            pages = max(pages, 2 + min(ROOM_TO_GROW, num_blocks - 1)) + 2 * info.kv.state_pages
        return {
            "num_kvcache_blocks": pages,
            "max_num_seqs": 8,
            "max_num_batched_tokens": _CHUNK,
        }


def settings(options: dict[str, Any], *, full: bool) -> list[Setting]:
    """Return the settings: the user's own `options`, and those with another KV cache or weights."""
    found = [Setting("", options)]
    if "kv_cache_dtype" not in options:
        for kind in ("int8", "int4"):
            found.append(Setting(f"{kind} KV", {**options, "kv_cache_dtype": kind}))
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
    all_, halves, long = shape.workload[1:]
    once: tuple[Calls, ...] = ((all_,),)
    twice: tuple[Calls, ...] = ((all_, all_),)
    drafted = ("accepted drafts",)
    if setting.name:
        yield Way("batches of 64", {"max_num_seqs": 64, **_COLD}, _filled(all_, 64))
        yield Way("chunks of 17 tokens", {"max_num_batched_tokens": 17}, once)
        yield Way("warm", {}, twice, ("cached tokens",))
        yield Way("n-gram drafts", {"speculative_config": _NGRAM}, once, drafted)
        return
    for size in (2, 3, 5, 8, 16, 32, 64) if full else (2, 5, 64):
        yield Way(f"batches of {size}", {"max_num_seqs": size, **_COLD}, _filled(all_, size))
    for chunk in (1, 7, 17, 64, 131) if full else (17,):
        few = all_[:4] if chunk == 1 else all_  # a step for each token
        options = {"max_num_batched_tokens": chunk, **_COLD}
        yield Way(f"chunks of {chunk} token{'s' * (chunk > 1)}", options, ((few,),))
    yield Way("warm", {}, twice, ("cached tokens",))
    yield Way("half warm", {}, ((halves, all_),), ("cached tokens",))
    yield Way("preempted", shape.small_pool, ((long,),), ("preemptions",))
    yield Way("call by call", {"enforce_eager": True}, once)
    for threads in (1, 2, 3, 4) if full else (1, 2):
        yield Way(f"{threads} CPU thread{'s' * (threads > 1)}", {"num_threads": threads}, once)
    for name, spec in shape.drafts.items():
        yield Way(name, {"speculative_config": spec}, once, drafted)
    mixed = {**shape.small_pool, "speculative_config": _NGRAM}
    both = ("preemptions", *drafted)
    yield Way("drafts, chunks, preempted", mixed, ((long, all_),), both)
    tiers = {**shape.small_pool, "kv_offload_gib": _HOST_GIB}
    yield Way("KV in host memory", tiers, twice, ("tokens from host memory",))
    # A page that is reused before it is written is never written: the first engine has room.
    files = ("tokens from files",)
    yield Way("KV in files", {}, ((all_,), (all_,)), files, keeps_files=True)
    yield Way("another process", {}, once, elsewhere=True)
    if shape.num_adapters > 1:
        yield Way("adapters in turn", {"max_loras": 1}, once)
        yield Way("adapters loaded again", {}, once, reloads=True)


_COLD: dict[str, Any] = {"enable_prefix_caching": False}


def _filled(all_: tuple[int, ...], size: int) -> tuple[Calls, ...]:
    """Return one call of all requests, as often as it takes to have `size` at once."""
    return ((all_ * -(-size // len(all_)),),)
