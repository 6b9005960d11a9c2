"""Offline examples of vLLM run with only the imports changed."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from tests.migrating import vllm_examples as examples


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs a program with arguments and returns what it printed."""

    def run(program: str, *argv: str) -> str:
        monkeypatch.setattr("sys.argv", ["example.py", *argv])
        names: dict[str, Any] = {"__name__": "__main__", "MODEL": demo_model.MODEL}
        try:
            exec(compile(program, "example.py", "exec"), names)
        finally:
            for value in list(names.values()):
                if isinstance(value, LLM):
                    value.shutdown()
            if "engine" in names:
                names["engine"].shutdown()
        return capsys.readouterr().out

    monkeypatch.setattr(demo_model, "default_model", lambda: demo_model.MODEL)
    return run


@pytest.mark.parametrize("name", examples.RUN)
def test_example_runs(run: Any, name: str) -> None:
    printed = run(examples.RUN[name])
    assert "text: " in printed
    assert "text: ''" not in printed
    assert "the same: False" not in printed


def test_outputs_of_an_engine_and_options_of_a_command_line(run: Any, demo_llm: LLM) -> None:
    """The engine's outputs hold all so far, and the flags reach the engine."""
    prompt = "A robot may not injure a human being"
    expected = demo_llm.generate(prompt, SamplingParams(0, 16), use_tqdm=False)[0].text
    flags = ["--max_model_len", "256", "-tp=1", "--swap-space=0", "--no-enable-prefix-caching"]
    assert run(examples.RESET_KV, *flags) == f"text: {expected!r}\n"
    printed = run(examples.LLM_ENGINE, "--model", demo_model.MODEL)
    assert sorted(line[-1] for line in printed.splitlines()) == ["0", "1", "2"]


def test_a_template_in_a_file(run: Any, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert run(examples.CHAT, "--chat-template-path", str(template)).count("text: ") == 7
