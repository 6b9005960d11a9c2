"""`nanovllm batch`: its flags, messages and exit statuses."""

import json
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from nanovllm.apps.cli import main as cli
from tests.batch.helpers import FLAGS, questions, write_rows


def run(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[int, str]:
    """Return the exit status and the last line of standard error."""
    status = cli.main(["batch", *map(str, argv)])
    return status, (capsys.readouterr().err.splitlines() or [""])[-1]


def test_rows_with_and_without_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, output = write_rows(tmp_path / "in.jsonl", questions(2)), tmp_path / "out.jsonl"
    status, said = run(capsys, source, output, *FLAGS, "--seed", "7")
    assert (status, said.partition(";")[0]) == (0, f"nanovllm: wrote {output}: 2 rows")
    assert [row["custom_id"] for row in map(json.loads, output.open())] == ["q0", "q1"]
    write_rows(source, [*questions(1), "{"])
    status, said = run(capsys, source, tmp_path / "2.jsonl", *FLAGS)
    assert status == 1
    assert "2 rows, 1 with an error: see its line; " in said


def test_an_input_of_no_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", [])
    status, said = run(capsys, source, tmp_path / "out.jsonl")
    assert (status, "0 rows" in said) == (0, True)
    assert (tmp_path / "out.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "0"], "--workers must be an integer from 1 to 65536, got 0"),
        (["--reasoning-parser", "x"], "--reasoning-parser must be one of"),
        (["--worker-options", "[1]"], "must be a dictionary"),
        (["--max-tokens", "5"], "there is no flag --max-tokens"),
        (["more"], "batch takes an INPUT and an OUTPUT, got 'more'"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be"),
    ],
)
def test_what_is_refused_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], message: str
) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(1))
    status, said = run(capsys, source, tmp_path / "out.jsonl", *flags)
    assert status == 2
    assert message in said
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_files_that_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", questions(1))
    status, said = run(capsys, tmp_path / "no.jsonl", tmp_path / "out.jsonl")
    assert (status, "cannot be read" in said) == (2, True)
    status, said = run(capsys, source, source)
    assert (status, "is the input" in said) == (2, True)
    status, said = run(capsys, source, tmp_path / "out.parquet")
    assert (status, "Ray Data reads other files" in said) == (2, True)
    status, said = run(capsys, source)
    assert (status, "OUTPUT" in said) == (2, True)


def test_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["batch", "--help-all"]) == 0
    text = capsys.readouterr().out
    for flag in ("--workers", "--ray-address", "--lora-modules", "--max-model-len"):
        assert f" {flag} " in text
