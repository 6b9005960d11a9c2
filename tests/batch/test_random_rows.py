"""Random rows, good and bad: each gets one output, or the job is refused before it begins.

`FUZZ_EXAMPLES=5000 pytest tests/batch/test_random_rows.py` makes that many rows of new seeds.
"""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm.apps.batch.rows import OUTPUT_COLUMNS, BadRowError, parse_object
from tests.batch.helpers import read_rows, run

NUM_ROWS = int(os.environ.get("FUZZ_EXAMPLES", 80))
SEED = time.time_ns() if "FUZZ_EXAMPLES" in os.environ else 0
TEXTS = ["", "A cache", "half \ud800", "\x00", "é😀", "x" * 3000, "<|im_end|>", "1e999", " "]
NUMBERS = [0, 1, -1, 3, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30, 0.5, -0.0, 1e308, True]
KEYS = [
    "",
    "a",
    "b",
    "é",
    "half \ud800",
    "id",
    "model",
    "error",
    "generated_text",
    "role",
    "prompt",
]
PARAMETERS = ["max_tokens", "temperature", "n", "seed", "stop", "logit_bias", "top_p", "max_token"]
WRONG = ["{", "[1]", "1", '{"prompt": "x"', '{"prompt": NaN}', '{"prompt": "a", "prompt": "b"}']
WRONG += [
    '{"prompt": "x", "a": 1e999}',
    '{"a": {"b": 1, "b": 2}}',
    '{"prompt": "\\ud800"}',
    "\ufeff{}",
]
WRONG += [
    '{"prompt": "x", "a": ' + depth * "[" + end + depth * "]" + "}"
    for depth, end in ((90, "1"), (120, "1"), (600, "1e999"), (900, "{}"), (20_000, ""))
]


def value(rng: random.Random, depth: int = 3) -> Any:
    """Return a random JSON value."""
    kinds = "text number none list object" if depth else "text number none"
    match rng.choice(kinds.split()):
        case "text":
            return rng.choice(TEXTS)
        case "number":
            return rng.choice(NUMBERS)
        case "list":
            return [value(rng, depth - 1) for _ in range(rng.randrange(3))]
        case "object":
            return {rng.choice(KEYS): value(rng, depth - 1) for _ in range(rng.randrange(3))}
    return None


def maybe(rng: random.Random, given: Any, chance: float = 0.8) -> Any:
    """Return what is given, or now and then any value."""
    return given if rng.random() < chance else value(rng)


def messages(rng: random.Random) -> Any:
    roles = ["user", "assistant", "system", "tool", "developer", "x"]
    return [
        maybe(rng, {"role": maybe(rng, rng.choice(roles)), "content": maybe(rng, "Hi")}, 0.9)
        for _ in range(rng.randrange(4))
    ]


def parameters(rng: random.Random) -> dict[str, Any]:
    good = {"max_tokens": 2, "temperature": 0.5, "seed": 7, "stop": ["a"], "top_p": 0.9}
    names = rng.sample(PARAMETERS, rng.randrange(3))
    return {name: maybe(rng, good.get(name, 1), 0.6) for name in names}


def plain_line(rng: random.Random) -> bytes:
    row: dict[str, Any] = {}
    if rng.random() < 0.9:
        row["prompt"] = maybe(rng, rng.choice(["A cache", "Hello!", [5, 6, 7]]))
    if rng.random() < 0.2:
        row["messages"] = maybe(rng, messages(rng))
    if rng.random() < 0.3:
        row["sampling_params"] = maybe(rng, parameters(rng))
    if rng.random() < 0.3:
        row["id"] = maybe(rng, rng.choice(["x", 5, "é"]))
    row |= {rng.choice(KEYS): value(rng) for _ in range(rng.randrange(3))}
    return damaged(rng, row)


def openai_line(rng: random.Random, number: int) -> bytes:
    chat = rng.random() < 0.6
    body = {"messages": maybe(rng, messages(rng))} if chat else {"prompt": maybe(rng, "A cache")}
    body |= {"max_tokens": 2, **parameters(rng)}
    if rng.random() < 0.2:
        body[rng.choice([*KEYS, "tools", "response_format", "stream"])] = value(rng)
    row = {
        "custom_id": maybe(rng, f"row {number}", 0.95),
        "method": maybe(rng, "POST", 0.97),
        "url": maybe(rng, f"/v1/{'chat/' * chat}completions", 0.97),
        "body": maybe(rng, body, 0.95),
    }
    return damaged(rng, row)


def damaged(rng: random.Random, row: dict[str, Any]) -> bytes:
    """Return a row as a line of JSON; now and then with a byte that is wrong, or missing."""
    line = json.dumps(row).encode()
    if rng.random() < 0.05:
        cut = rng.randrange(len(line))
        return line[:cut] + rng.choice([b"", b"\xff", b'"', b"{", b"\x00"]) + line[cut + 1 :]
    return line


def fields_of(line: bytes, error: str | None) -> dict[str, Any]:
    """Return what a row has; nothing if it cannot be read, which is then its error."""
    try:
        return parse_object(line)
    except BadRowError as problem:
        assert str(problem) == error  # noqa: PT017
        return {}


def strictly(line: str) -> Any:
    """Return the value of a line of an output, which has no NaN and no infinity."""
    return json.loads(line, parse_constant=lambda name: pytest.fail(f"the output has {name}"))


def test_every_row_has_one_output(tmp_path: Path) -> None:
    """And what the row had stays."""
    rng = random.Random(SEED)
    lines = [*map(str.encode, WRONG), *(plain_line(rng) for _ in range(NUM_ROWS))]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    assert run(source, output, sampling={"max_tokens": 1}).num_rows == len(lines), SEED
    rows = [strictly(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == len(lines), SEED
    for number, (line, row) in enumerate(zip(lines, rows, strict=True)):
        assert set(OUTPUT_COLUMNS) <= row.keys()
        assert (row["error"] is None) == (row["finish_reason"] in ("stop", "length")), (SEED, line)
        given = fields_of(line, row["error"])
        kept = {name: given[name] for name in given if name not in (*OUTPUT_COLUMNS, "id")}
        assert {name: row[name] for name in kept} == kept, (SEED, line)
        assert row["id"] == (number if given.get("id") is None else given["id"])


def test_every_openai_row_has_one_output(tmp_path: Path) -> None:
    """None fails by an error of ours: its status is 200, or says what is wrong with the row."""
    pytest.importorskip("fastapi")
    rng = random.Random(SEED)
    first = {
        "custom_id": "first",
        "url": "/v1/completions",
        "body": {"prompt": "A", "max_tokens": 1},
    }
    lines = [json.dumps(first).encode()]
    lines += [openai_line(rng, number) for number in range(NUM_ROWS)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    run(source, output)
    rows = read_rows(output)
    assert len(rows) == len(lines), SEED
    for line, row in zip(lines, rows, strict=True):
        status = row["response"]["status_code"]
        assert status in (200, 400, 404), (SEED, line, row)
        assert (row["error"] is None) == (status == 200), (SEED, line)
