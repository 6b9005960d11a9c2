"""`nanovllm models`: the list, the report as text and as JSON, and its exit statuses."""

import json
from pathlib import Path

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.models.registry import MODULES
from tests.checkpoints import write_json
from tests.models.family_configs import config_of

Capture = pytest.CaptureFixture[str]


def test_the_list_has_a_line_for_each_architecture(capsys: Capture) -> None:
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MODULES)
    assert len({line.index(line.split(maxsplit=1)[1]) for line in lines}) == 1
    assert cli.main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    for row, line in zip(rows, lines, strict=True):
        assert line.endswith(f"{row['models']}: {row['layers']}")


def test_the_report(capsys: Capture, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", config_of("Gemma4UnifiedForConditionalGeneration"))
    assert cli.main(["models", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert (
        "attention      3 layers: causal, window 32, heads 4, kv heads 2, head dim 16, qk norm, "
        "rope default, rope theta 10000, rope share 1, rope factor 1, scale 1, own kv\n" in out
    )
    assert "1 layer: causal, heads 4, kv heads 1, head dim 32, qk norm, rope" in out
    assert "logit softcap  30.0\nleft out       vision\n" in out
    assert cli.main(["show", str(tmp_path), "--json"]) == 0  # its other name
    assert json.loads(capsys.readouterr().out)["memory"]["kv_token_bytes"] == 128


def test_a_model_that_is_not_supported(capsys: Capture, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["T5Model"]})
    assert cli.main(["models", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "architecture  T5Model",
        "supported     no: architecture 'T5Model' is not supported: `nanovllm models` lists"
        " those that are",
    ]
    assert err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no/such/model"], "model directory 'no/such/model' does not exist"),
        (["a", "b"], "models takes one MODEL, got 'b'"),
        (["--form"], "there is no flag --form"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: Capture) -> None:
    assert cli.main(["models", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"nanovllm: {message}")
    assert err.count("\n") == 1


def test_a_config_with_a_broken_field(capsys: Capture, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {**config_of("Qwen3ForCausalLM"), "hidden_size": "x"})
    assert cli.main(["models", str(tmp_path)]) == 2
    assert "config.json: hidden_size must be an integer" in capsys.readouterr().err


def test_lines_are_wrapped_at_a_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["models", demo_model.MODEL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith(" " * 14) for line in lines)
