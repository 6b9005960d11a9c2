"""Rows that name an adapter as their model."""

from pathlib import Path

import pytest

from nanovllm import demo_model
from nanovllm.apps.batch.batch_options import adapter_digest
from nanovllm.apps.batch.job import run_job
from nanovllm.apps.batch.row_engine import RowEngine
from nanovllm.apps.batch.sources import open_source
from nanovllm.errors import CheckpointError, ConfigError
from tests.batch.helpers import ENGINE, read_rows, row_options, run, write_rows
from tests.batch.test_job import FlakyPool, Killed
from tests.glossary import QUESTION
from tests.lora.adapters import linears_of, write_adapter

OPTIONS = {"engine_options": {**ENGINE, "enable_lora": True, "max_model_len": 512}}
MODELS = ["a", "b", None, "model", demo_model.MODEL]


@pytest.fixture
def modules(tmp_path: Path) -> tuple[str, ...]:
    """Two adapters that change the answers, as options."""
    linears = linears_of(demo_model.MODEL)
    paths = [write_adapter(tmp_path / n, linears, seed=i, size=4.0) for i, n in enumerate("ab")]
    return (f"a={paths[0]}", f"b={paths[1]}")


def test_rows_with_a_prompt(tmp_path: Path, modules: tuple[str, ...]) -> None:
    """A job that was killed goes on with the same adapters only, by what their files hold."""
    rows = [{"prompt": QUESTION, "id": "x", "model": model} for model in [*MODELS, "c", ["a"]]]
    rows += [{"messages": [{"role": "user", "content": QUESTION}], "model": "a"}]
    source, output = open_source(write_rows(tmp_path / "in.jsonl", rows)), tmp_path / "out.jsonl"
    options = row_options(**OPTIONS, lora_modules=modules)
    FlakyPool.rows_left = 2
    with pytest.raises(Killed):
        run_job(source, output, options, lambda: FlakyPool(options))
    changed = row_options(**OPTIONS, lora_modules=(modules[0], f"b={tmp_path / 'a'}"))
    with pytest.raises(ConfigError, match="its adapters' files"):
        run_job(source, output, changed, lambda: RowEngine(changed))
    run_job(source, output, options, lambda: RowEngine(options))
    found = read_rows(output)
    a, b, *base = (row["generated_text"] for row in found[:5])
    assert len({a, b, base[0]}) == 3
    assert {*base} == {base[0]}
    for row in found[5:7]:
        assert "does not exist; there are 'model', 'a', 'b'" in row["error"]
    assert found[7]["error"] is None


def test_rows_of_openai(tmp_path: Path, modules: tuple[str, ...]) -> None:
    pytest.importorskip("fastapi")
    rows = [
        {
            "custom_id": str(model),
            "url": "/v1/completions",
            "body": {"prompt": QUESTION, "max_tokens": 6, "temperature": 0, "model": model},
        }
        for model in ("a", "b", "model")
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    run(source, tmp_path / "out.jsonl", **OPTIONS, lora_modules=modules)
    bodies = [row["response"]["body"] for row in read_rows(tmp_path / "out.jsonl")]
    assert [body["model"] for body in bodies] == ["a", "b", "model"]
    assert len({body["choices"][0]["text"] for body in bodies}) == 3


def test_bad_adapters(tmp_path: Path, modules: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="enable_lora is False"):
        row_options(lora_modules=modules)
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "model": "a"}])
    with pytest.raises(ConfigError, match="lora_modules: .* has no adapter_config"):
        run(source, tmp_path / "out.jsonl", **OPTIONS, lora_modules=(f"a={tmp_path}",))
    assert adapter_digest(str(tmp_path / "a")) != adapter_digest(str(tmp_path / "b"))
    assert adapter_digest("/no/such") != adapter_digest("/nor/such")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "adapter_config.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="is outside the directory"):
        adapter_digest(str(tmp_path / "c"))
