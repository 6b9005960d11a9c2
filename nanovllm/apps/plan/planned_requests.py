"""The requests of a plan: read from published traces and from the server's log, or made.

Every source is an iterator in the order of arrival, so a million requests are never held.
"""

import csv
import heapq
import json
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.apps.plan.options import MadeRequests
from nanovllm.errors import ConfigError

MOONCAKE_BLOCK = 512
"""Tokens for which Mooncake's traces have one number: equal numbers are equal prefixes."""


class Run(NamedTuple):
    """Equal tokens of a prompt, one after the other."""

    token_id: int
    length: int


class PlannedRequest(NamedTuple):
    """A request: when it comes, its prompt, how many tokens it gets."""

    arrival: float
    """In seconds from the first."""
    prompt: tuple[Run, ...]
    num_output: int
    conversation: str = ""
    """Requests with the same one prefer the same replica."""
    output_token: int = 0
    """What its output is, again and again."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens of its prompt."""
        return [run.token_id for run in self.prompt for _ in range(run.length)]


def made(options: MadeRequests) -> Iterator[PlannedRequest]:
    """Yield the requests that the options describe."""
    rng = random.Random(options.seed)
    first_token = options.num_groups
    pending: list[tuple[float, int, int, tuple[Run, ...], str]] = []
    numbers = count()
    now = 0.0
    num_begun = 0
    per_turn = options.num_turns / options.rate
    for _ in range(options.num_requests):
        if not pending or now <= pending[0][0]:
            prompt: tuple[Run, ...] = ()
            if options.shared_len:
                prompt = (Run(rng.randrange(options.num_groups), options.shared_len),)
            begun = now, next(numbers), 1, prompt, str(num_begun)
            num_begun += 1
            shape = 1 / options.burstiness
            now += rng.gammavariate(shape, per_turn / shape)
            heapq.heappush(pending, begun)
        arrival, number, turn, prompt, conversation = heapq.heappop(pending)
        own, output = (
            max(1, round(rng.lognormvariate(math.log(median), options.spread)))
            for median in (options.prompt_len, options.output_len)
        )
        token = first_token + 2 * number
        prompt = (*prompt, Run(token, own))
        yield PlannedRequest(arrival, prompt, output, conversation, token + 1)
        if turn < options.num_turns:
            later = arrival + rng.expovariate(1 / max(options.think_seconds, 1e-9))
            said = (*prompt, Run(token + 1, output))
            heapq.heappush(pending, (later, next(numbers), turn + 1, said, conversation))


def read_trace(path: Path, speed: float = 1.0) -> Iterator[PlannedRequest]:
    """Yield the requests of a trace, whose form the first line shows: Azure's of 2023 and 2024 or
    BurstGPT's, both CSV; Mooncake's JSON lines, whose hashes say which prefixes are equal; or the
    log of `nanovllm serve`.

    Args:
        speed: requests come so many times as fast.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong; it names the row.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            file.seek(0)
            read = next((read for mark, read in _FORMS.items() if mark in head), _log)
            rows: Iterable[Any] = csv.DictReader(file) if read in (_azure, _burstgpt) else file
            found = _read(path, rows, read)
            first: float | None = None
            last = 0.0
            for request in _sorted(found) if read is _log else found:
                first = request.arrival if first is None else first
                arrival = (request.arrival - first) / speed
                if arrival < last:
                    raise ConfigError(
                        f"{path}: a request at {request.arrival:g} s comes before the one above "
                        "it: sort the rows by time"
                    )
                last = arrival
                yield request._replace(arrival=arrival)
            if first is None:
                raise ConfigError(f"{path} has no request of a form that is known")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error}") from error


_Read = Callable[[int, Any], PlannedRequest | None]


def _read(path: Path, rows: Iterable[Any], read: _Read) -> Iterator[PlannedRequest]:
    """Yield the requests of a file's rows; an error names the row."""
    for number, row in enumerate(rows, 1):
        try:
            request = read(number, row)
        except (KeyError, ValueError, TypeError) as error:
            what = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: row {number}: {what}") from error
        if request is not None:
            yield request


def _azure(number: int, row: Any) -> PlannedRequest:
    text = re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"].strip())
    when = datetime.fromisoformat(text)
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return _alone(number, when.timestamp(), row["ContextTokens"], row["GeneratedTokens"])


def _burstgpt(number: int, row: Any) -> PlannedRequest | None:
    if int(row["Response tokens"]) == 0:  # it failed
        return None
    found = _alone(number, row["Timestamp"], row["Request tokens"], row["Response tokens"])
    return found._replace(conversation=row.get("Session ID") or found.conversation)


def _mooncake(number: int, line: Any) -> PlannedRequest:
    row = json.loads(line)
    length = _positive("input_length", row["input_length"])
    hashes = row["hash_ids"]
    if len(hashes) != -(-length // MOONCAKE_BLOCK):
        raise ValueError(f"{len(hashes)} hash_ids for {length} tokens, {MOONCAKE_BLOCK} each")
    ends = (*[MOONCAKE_BLOCK] * (len(hashes) - 1), (length - 1) % MOONCAKE_BLOCK + 1)
    prompt = tuple(Run(int(each) + 1, size) for each, size in zip(hashes, ends, strict=True))
    output = _positive("output_length", row["output_length"])
    conversation = str(hashes[min(len(hashes), 2) - 1])
    return PlannedRequest(float(row["timestamp"]) / 1000, prompt, output, conversation)


def _log(number: int, line: Any) -> PlannedRequest | None:
    if line.startswith("{"):
        fields = json.loads(line)
        found = fields.get("request", {})
        written = fields.get("time", "").replace("Z", "+00:00")
    else:
        found = dict(re.findall(r"(\w+)=(\S+)", line))
        written = line[:23].replace(",", ".")
    if int(found.get("output_tokens", 0)) == 0:
        return None  # it is no request, or got nothing
    arrival = datetime.fromisoformat(written).timestamp() - float(found["duration"])
    return _alone(number, arrival, found["prompt_tokens"], found["output_tokens"])


_FORMS: dict[str, _Read] = {
    "ContextTokens": _azure,
    "Request tokens": _burstgpt,
    "input_length": _mooncake,
}
"""By what the first line of a trace has."""
_LONGEST = 3600.0
"""A line of the log is written when a request ends, and is put back by so many seconds at most."""


def _sorted(requests: Iterable[PlannedRequest]) -> Iterator[PlannedRequest]:
    waiting: list[PlannedRequest] = []
    for request in requests:
        heapq.heappush(waiting, request)
        while waiting[0].arrival < request.arrival - _LONGEST:
            yield heapq.heappop(waiting)
    while waiting:
        yield heapq.heappop(waiting)


def _alone(number: int, arrival: Any, prompt: Any, output: Any) -> PlannedRequest:
    """Return a request that shares no prefix."""
    runs = (Run(number, _positive("the prompt's length", prompt)),)
    output = _positive("the output's length", output)
    return PlannedRequest(float(arrival), runs, output, str(number))


def _positive(name: str, value: Any) -> int:
    found = int(value)
    if found < 1:
        raise ValueError(f"{name} is {found}: it must be 1 or more")
    return found
