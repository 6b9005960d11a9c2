"""The requests of a plan: read from published traces and from the server's log, or made.

Every source is an iterator in the order of arrival, so a million requests are never held.
"""

import csv
import heapq
import io
import json
import math
import random
import re
from collections.abc import Callable, Iterator
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


def read_trace(path: Path, form: str, speed: float) -> Iterator[PlannedRequest]:
    """Yield the requests of a trace.

    Args:
        form: Azure's of 2023 and 2024 (TIMESTAMP, ContextTokens, GeneratedTokens),
            BurstGPT's (Timestamp, Request tokens, Response tokens, Session ID), both CSV;
            Mooncake's JSON lines (timestamp, input_length, output_length, hash_ids); or the log
            of `nanovllm serve`.
        speed: requests come so many times as fast.

    Raises:
        ConfigError: the file cannot be read, or a row is wrong; it names the row.
    """
    rows = {"azure": _azure, "burstgpt": _burstgpt, "mooncake": _mooncake, "nanovllm": _log}[form]
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first: float | None = None
            last = 0.0
            for number, request in enumerate(_numbered(path, file, rows), 1):
                first = request.arrival if first is None else first
                arrival = (request.arrival - first) / speed
                if arrival < last:
                    raise ConfigError(
                        f"{path}: request {number} comes before the one above it: sort the rows "
                        "by time"
                    )
                last = arrival
                yield request._replace(arrival=arrival)
            if first is None:
                raise ConfigError(f"{path} has no request")
    except OSError as error:
        raise ConfigError(f"--trace {path}: {error}") from error


def _numbered(
    path: Path, file: io.TextIOBase, rows: Callable[[io.TextIOBase], Iterator[Any]]
) -> Iterator[PlannedRequest]:
    """Yield the requests of a file; an error names the row."""
    found = rows(file)
    for row in count(1):
        try:
            request = next(found)
        except StopIteration:
            return
        except (KeyError, ValueError, TypeError) as error:
            what = f"no column {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: row {row}: {what}") from error
        if request is not None:
            yield request


def _azure(file: io.TextIOBase) -> Iterator[PlannedRequest]:
    for number, row in enumerate(csv.DictReader(file)):
        text = re.sub(r"(\.\d{6})\d+", r"\1", row["TIMESTAMP"].strip())
        when = datetime.fromisoformat(text)
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        yield _alone(number, when.timestamp(), row["ContextTokens"], row["GeneratedTokens"])


def _burstgpt(file: io.TextIOBase) -> Iterator[PlannedRequest | None]:
    for number, row in enumerate(csv.DictReader(file)):
        session = row.get("Session ID") or ""
        if int(row["Response tokens"]) == 0:  # it failed
            yield None
            continue
        found = _alone(number, row["Timestamp"], row["Request tokens"], row["Response tokens"])
        yield found._replace(conversation=session or found.conversation)


def _mooncake(file: io.TextIOBase) -> Iterator[PlannedRequest]:
    for line in file:
        row = json.loads(line)
        length = _positive("input_length", row["input_length"])
        hashes = row["hash_ids"]
        if len(hashes) != -(-length // MOONCAKE_BLOCK):
            raise ValueError(f"{len(hashes)} hash_ids for {length} tokens, {MOONCAKE_BLOCK} each")
        ends = (*[MOONCAKE_BLOCK] * (len(hashes) - 1), (length - 1) % MOONCAKE_BLOCK + 1)
        prompt = tuple(Run(int(each) + 1, size) for each, size in zip(hashes, ends, strict=True))
        output = _positive("output_length", row["output_length"])
        conversation = str(hashes[min(len(hashes), 2) - 1])
        yield PlannedRequest(float(row["timestamp"]) / 1000, prompt, output, conversation)


_LONGEST = 3600.0
"""A line of the log is written when a request ends, and is put back by so many seconds at most."""
_FIELD = re.compile(r"(\w+)=(\S+)")


def _log(file: io.TextIOBase) -> Iterator[PlannedRequest | None]:
    waiting: list[tuple[float, int, PlannedRequest]] = []
    for number, line in enumerate(file):
        if line.startswith("{"):
            fields = json.loads(line)
            found = fields.get("request", {})
            written = fields["time"].replace("Z", "+00:00")
        else:
            found = dict(_FIELD.findall(line))
            written = line[:23].replace(",", ".")
        if int(found.get("output_tokens", 0)) == 0:
            yield None  # it is no request, or got nothing
            continue
        ended = datetime.fromisoformat(written).timestamp()
        arrival = ended - float(found["duration"])
        one = _alone(number, arrival, found["prompt_tokens"], found["output_tokens"])
        heapq.heappush(waiting, (arrival, number, one))
        while waiting[0][0] < ended - _LONGEST:
            yield heapq.heappop(waiting)[-1]
    while waiting:
        yield heapq.heappop(waiting)[-1]


def _alone(number: int, arrival: Any, prompt: Any, output: Any) -> PlannedRequest:
    """Return a request that shares no prefix."""
    runs = (Run(number + 1, _positive("the prompt's length", prompt)),)
    output = _positive("the output's length", output)
    return PlannedRequest(float(arrival), runs, output, str(number))


def _positive(name: str, value: Any) -> int:
    found = int(value)
    if found < 1:
        raise ValueError(f"{name} is {found}: it must be 1 or more")
    return found
