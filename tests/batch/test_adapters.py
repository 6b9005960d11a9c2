"""Rows that name an adapter as their model."""

from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from nanovllm.apps.batch.batch_options import adapter_digest
from nanovllm.apps.batch.job import run_job
from nanovllm.apps.batch.rows import Source
from nanovllm.demo_model import MODEL
from nanovllm.errors import CheckpointError, ConfigError
from tests.batch.helpers import ENGINE, read_rows, row_options, run, text_of, text_row, write_rows
from tests.batch.test_job import FlakyPool, Killed
from tests.glossary import QUESTION
from tests.lora.adapters import linears_of, write_adapter

LORA = {**ENGINE, "enable_lora": True, "max_model_len": 512}


@pytest.fixture
def modules(tmp_path: Path) -> tuple[str, ...]:
    """Two adapters that change the answers, as options."""
    linears = linears_of(MODEL)
    paths = [write_adapter(tmp_path / n, linears, seed=i, size=4.0) for i, n in enumerate("ab")]
    return (f"a={paths[0]}", f"b={paths[1]}")


def test_a_body_names_an_adapter(tmp_path: Path, modules: tuple[str, ...]) -> None:
    """A job that was killed goes on with the same adapters only, by what their files hold."""
    rows = [
        text_row(f"{model}", QUESTION, temperature=0, model=model) for model in ("a", "b", "model")
    ]
    source, output = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    options = row_options(LORA, lora_modules=modules)
    FlakyPool.rows_left = 1
    with pytest.raises(Killed):
        run_job(Source(source), output, options, FlakyPool)
    changed = (modules[0], f"b={tmp_path / 'a'}")
    with pytest.raises(ConfigError, match="its adapters' files"):
        run(source, output, engine_options=LORA, lora_modules=changed)
    run(source, output, engine_options=LORA, lora_modules=modules)
    found = read_rows(output)
    assert [row["response"]["body"]["model"] for row in found] == ["a", "b", "model"]
    assert len({text_of(row) for row in found}) == 3


def test_bad_adapters(tmp_path: Path, modules: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="enable_lora is False"):
        row_options(lora_modules=modules)
    source = write_rows(tmp_path / "in.jsonl", [text_row("a", "a", model="a")])
    bad = (f"a={tmp_path}",)
    with pytest.raises(ConfigError, match="has no adapter_config"):
        run(source, tmp_path / "out.jsonl", engine_options=LORA, lora_modules=bad)
    assert adapter_digest(str(tmp_path / "a")) != adapter_digest(str(tmp_path / "b"))
    assert adapter_digest("/no/such") != adapter_digest("/nor/such")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "adapter_config.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="is outside the directory"):
        adapter_digest(str(tmp_path / "c"))
