"""Parts of a dataset: written once, whole, by one process."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.apps.ray.part_files import Parts, is_done
from nanovllm.errors import ConfigError

pa = pytest.importorskip("pyarrow")


def table(*ids: Any) -> Any:
    return pa.table({"id": list(ids), "text": ["x"] * len(ids)})


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_ids_of_parts(form: str, tmp_path: Path) -> None:
    with Parts(tmp_path / "out", {}, form, "id") as parts:
        assert not len(parts.done_ids())
        parts.add(table(1, 2))
        parts.add(table())
        parts.flush()
        parts.add(table(3))
    with Parts(tmp_path / "out", {}, form, "id") as parts:
        assert [path.name for path in parts.files()] == [f"part-00000{i}.{form}" for i in range(2)]
        assert is_done(parts.done_ids(), [0, 1, 2, 3, 4, "1"]) == [
            *(False, True, True, True),
            *(False, False),
        ]


def test_rows_without_ids_are_refused(tmp_path: Path) -> None:
    """Symptom: a resumed job left out all rows without an id as soon as one was done."""
    with (
        pytest.raises(ConfigError, match="2 rows have no id"),
        Parts(tmp_path / "out", {}, "jsonl", "id") as parts,
    ):
        parts.add(table(1, None, None))


def test_no_part_is_written_over(tmp_path: Path) -> None:
    for number in range(3):
        with Parts(tmp_path / "out", {}, "jsonl", "id") as parts:
            parts.add(table(number))
        if number == 1:
            parts.files()[0].unlink()
    assert [json.loads(path.read_text())["id"] for path in parts.files()] == [1, 2]


def test_many_ids() -> None:
    from nanovllm.apps.ray.part_files import _digests

    done = sorted(_digests([f"row-{i}" for i in range(0, 5000, 2)]))
    import numpy as np

    found = is_done(np.array(done), [f"row-{i}" for i in range(5000)])
    assert found == [i % 2 == 0 for i in range(5000)]


def test_who_may_write(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    with (
        Parts(directory, {"model": "a"}, "jsonl", "id"),
        pytest.raises(ConfigError, match="another process works on"),
        Parts(directory, {"model": "a"}, "jsonl", "id"),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="another job: its model is 'a', now 'b'"),
        Parts(directory, {"model": "b"}, "jsonl", "id"),
    ):
        pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with (
        pytest.raises(ConfigError, match="holds other files"),
        Parts(tmp_path / "mine", {}, "jsonl", "id"),
    ):
        pass


def test_an_error_leaves_whole_parts(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), Parts(tmp_path / "out", {}, "jsonl", "id") as parts:
        parts.add(table(1))
        raise KeyError
    (part,) = parts.files()
    assert json.loads(part.read_text()) == {"id": 1, "text": "x"}
