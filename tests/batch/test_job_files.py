"""The files of a job: what a crash leaves, who may write, and whose rows they are."""

import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.apps.batch.job_files import JobFiles, Journal
from nanovllm.errors import ConfigError


def test_a_journal_cut_at_any_byte_keeps_the_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    journal = Journal(path)
    for index in (1, 0, 3, 2, 4):
        journal.append(index, b'{"n": %d}' % index)
    journal.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        again = Journal(path)
        assert len(again) == whole[:size].count(b"\n")
        for index in range(5):
            again.append(index, b'{"n": %d}' % index)
        again.close()
        assert [json.loads(line)["n"] for line in again.in_order()] == [0, 1, 2, 3, 4]
        assert path.read_bytes().count(b"\n") == 5


def test_a_journal_ends_at_a_damaged_line(tmp_path: Path) -> None:
    """After a power cut, zeros may stand where a line was. One that is there twice counts once."""
    path = tmp_path / "rows.jsonl"
    whole = b'0\t{"n": 0}\n1\t{}\n0\t{"n": 0}\n'
    path.write_bytes(whole + b"\0" * 11 + b'\n2\t{"n": 2}\n')
    journal = Journal(path)
    assert [index in journal for index in range(3)] == [True, True, False]
    assert (len(journal), list(journal.in_order())) == (2, [b'{"n": 0}', b"{}"])
    assert path.read_bytes() == whole
    journal.close()


def test_a_journal_holds_no_rows_in_memory(tmp_path: Path) -> None:
    """It keeps a number, and the few rows that were finished before an earlier one."""
    journal = Journal(tmp_path / "rows.jsonl")
    order = [i + j for i in range(0, 2000, 20) for j in random.Random(i).sample(range(20), 20)]
    for index in order:
        journal.append(index, b"{}")
        assert len(journal._beyond) < 20
    assert journal.num_leading == 2000
    journal.close()


def test_two_drivers(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    files = JobFiles(output, {"model": "a"})
    other = (
        "from pathlib import Path\nfrom nanovllm.apps.batch.job_files import JobFiles\n"
        f"JobFiles(Path({str(output)!r}), {{'model': 'a'}})"
    )
    found = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
    assert "another process works on" in found.stderr
    with pytest.raises(ConfigError, match="another process works on"):
        JobFiles(output, {"model": "a"})
    files.close()
    assert subprocess.run([sys.executable, "-c", other]).returncode == 0
    JobFiles(output, {"model": "a"}).close()


def test_another_job(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    JobFiles(output, {"model": "a", "sampling": {"top_p": 0.5}}).close()
    with pytest.raises(ConfigError, match="another job: its model is 'a', now 'b'; give the same"):
        JobFiles(output, {"model": "b", "sampling": {"top_p": 0.5}})
    with pytest.raises(ConfigError, match="its sampling: top_k is None, now 3"):
        JobFiles(output, {"model": "a", "sampling": {"top_p": 0.5, "top_k": 3}})
    (tmp_path / "out.jsonl.parts" / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged: remove"):
        JobFiles(output, {"model": "a"})


def test_what_stands_in_the_way(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(ConfigError, match="out.jsonl' exists: name another, or remove it"):
        JobFiles(output, {})
    output.unlink()
    (tmp_path / "out.jsonl.parts").mkdir()
    (tmp_path / "out.jsonl.parts" / "mine").touch()
    with pytest.raises(ConfigError, match="holds other files and no job"):
        JobFiles(output, {})
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        JobFiles(tmp_path / "none" / "out.jsonl", {})
    (tmp_path / "out.jsonl.parts" / "mine").rename(tmp_path / "out.jsonl.parts/manifest.json.new")
    JobFiles(output, {}).close()  # a manifest that was killed on its way


def test_the_output_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    files = JobFiles(output, {})
    with contextlib.suppress(OSError), files.writing(0) as file:
        file.write(b"half")
        raise OSError("the disk is full")
    assert not output.exists()
    assert files.num_failed is None
    with files.writing(3) as file:
        file.write(b"whole")
    assert output.read_bytes() == b"whole"
    files.close()
    again = JobFiles(output, {})
    assert again.num_failed == 3
    again.remove()
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_an_output_that_somebody_else_has_made(tmp_path: Path) -> None:
    """It stays as it is, and so does what is done."""
    output = tmp_path / "out.jsonl"
    files = JobFiles(output, {})
    files.journal.append(0, b"{}")
    output.touch()
    for _ in range(2):
        with (
            pytest.raises(ConfigError, match="exists, and this job has not written it"),
            files.writing(0) as file,
        ):
            file.write(b"whole")
        files.close()
        with pytest.raises(ConfigError, match="move it away"):
            JobFiles(output, {})
        output.unlink()
        files = JobFiles(output, {})
        assert len(files.journal) == 1
        output.write_text("another")
    assert output.read_text() == "another"
