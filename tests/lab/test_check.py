"""`nanovllm lab check`: right plugins pass, and each broken twin is found by the check for it."""

import builtins
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from nanovllm import demo_model, errors
from nanovllm.apps.cli import main as cli
from nanovllm.apps.lab.check import Finding, _guarded, _proof, check
from nanovllm.apps.lab.lab_options import CheckOptions
from nanovllm.apps.lab.plugin import EVICTION, find_plugin
from nanovllm.apps.prove.prove_options import ProveOptions
from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.library import library
from tests.helpers import ROOT

TWINS = ROOT / "tests/lab/twins.py"
EXAMPLES = ROOT / "examples/lab"
PROVE = ProveOptions(num_requests=4, ways=("preempted",))


def checked(file: Path, name: str | None = None, **options: Any) -> dict[str, Finding]:
    plugin = find_plugin(str(file), name)
    how = CheckOptions(**{"num_runs": 20, **options})
    return {each.name: each for each in check(plugin, demo_model.MODEL, {}, how, PROVE)}


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.apps.lab.check._proof", lambda *_: (True, ""))


@pytest.mark.parametrize("name", ["shortest_job_first", "longest_prefix_first", "lfu_eviction"])
def test_a_right_plugin_passes(name: str) -> None:
    found = checked(EXAMPLES / f"{name}.py")
    assert all(finding.holds for finding in found.values()), found
    assert "2 ways" in found["the same bits"].words


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--class", "LosesPages", "--num-runs", "20", "--ways", "preempted"]
    assert cli.main(["lab", "check", str(TWINS), demo_model.MODEL, *arguments]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^random calls +FAILS", out, re.MULTILINE)
    assert out.endswith("eviction_policy twins:LosesPages breaks rules: 1 of 1 tried.\n")


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("NeverAges", "a long request among short ones", "it starves: after 500 more requests"),
        ("LosesASequence", "random runs", "waiting requests never run"),
        ("AsksTheClock", "random runs", "order"),
        ("PreemptsTheFirst", "random runs", "starves|waiting requests never run"),
        ("LongestPrefixOnly", "a request among others with one prefix", "it starves"),
        ("ReturnsAPageTwice", "random calls", r"it holds \[.*\], and \[.*\] are free"),
        ("LosesPages", "random calls", r"it holds \[.*\], and \[.*\] are free"),
        ("ForgetsHits", "hits", "it keeps less than an order that takes any page"),
        ("TakesWhatIsHeld", "random calls", "which holds something|first of iter"),
    ],
)
@pytest.mark.usefixtures("without_engine")
def test_a_broken_twin_is_found(name: str, where: str, words: str) -> None:
    found = checked(TWINS, name)
    assert not found[where].holds
    assert re.search(words, found[where].words)


@pytest.mark.parametrize("kind", ["ValueError", "PluginError"])
def test_an_error_without_words_is_shown_as_code(kind: str) -> None:
    """Symptom: the words of a broken rule are "AssertionError in _check_budgets: "."""

    def fails() -> tuple[bool, str]:
        raise getattr(
            errors if kind == "PluginError" else builtins,
            kind,
        )

    code = 'raise getattr( errors if kind == "PluginError" else builtins, kind, )'
    assert _guarded(fails) == (False, f"{kind} in fails: {code}")


def test_ways_that_show_nothing_are_no_proof() -> None:
    """A sequence of one block is never preempted."""
    plugin = find_plugin(str(EXAMPLES / "lfu_eviction.py"))
    with plugin.importable(), pytest.raises(ConfigError, match="nothing is shown"):
        _proof(plugin, demo_model.MODEL, {"max_model_len": 32}, PROVE)


@pytest.mark.skipif(library() is None, reason="an 8-bit KV cache needs the C kernels")
def test_the_ways_of_another_setting_are_counted() -> None:
    """Symptom: KeyError: ''."""
    plugin = find_plugin(str(EXAMPLES / "lfu_eviction.py"))
    ways = ProveOptions(num_requests=4, ways=("int8 KV, warm",))
    with plugin.importable():
        holds, words = _proof(plugin, demo_model.MODEL, {}, ways)
    assert holds, words
    assert words.startswith("4 requests, 1 way as")


@pytest.mark.usefixtures("without_engine")
def test_the_calls_that_fail_are_shown() -> None:
    words = checked(TWINS, "LosesPages")["random calls"].words
    assert re.search(r"^state\.let_go\(.*is_filled=True", words, re.MULTILINE)


@pytest.mark.usefixtures("without_engine")
def test_users_may_have_to_take_turns() -> None:
    file = EXAMPLES / "shortest_job_first.py"
    found = checked(file, fair=True)["users take turns"]
    assert not found.holds
    assert "gets 90% beside one with two" in found.words


def test_an_engine_that_a_twin_ends_is_a_finding() -> None:
    """Symptom: `lab check` ends with a traceback where the plugin ends the engine."""
    plugin = find_plugin(str(TWINS), "CannotRevive")
    with plugin.importable():
        holds, words = _guarded(lambda: _proof(plugin, demo_model.MODEL, {}, PROVE))
    assert not holds
    assert 'eviction_policy="twins:CannotRevive": remove() raised KeyError: 7' in words


@pytest.mark.usefixtures("without_engine")
def test_a_call_that_does_not_return_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.apps.lab.check._CALL_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGALRM)
    found = checked(TWINS, "NeverReturns")
    assert {finding.words for finding in found.values() if not finding.holds} == {
        "first() did not return within 0.1 s"
    }
    assert signal.getsignal(signal.SIGALRM) is before


PLUGIN = "from nanovllm.scheduler.fair_policy import FairPolicy\n"


@pytest.mark.parametrize(
    ("name", "code", "class_name", "message"),
    [
        ("two_here", f"{PLUGIN}class A(FairPolicy): ...\nclass B(FairPolicy): ...", None,
         "two_here.py has 2 plugins: name one, class A or B"),
        ("none_here", PLUGIN, None, "has no plugin: a class derived from nanovllm.scheduler.pol"),
        ("one_here", f"{PLUGIN}class A(FairPolicy): ...", "C", "class 'C' is no plugin in .*: A$"),
        ("wrong_here", "import no_such_module", None, "ModuleNotFoundError: No module named 'no_"),
        ("exits_here", "import sys; sys.exit(3)", None, "cannot be imported: SystemExit: 3"),
        ("random", "", None, "is hidden by another module random"),
        ("no-module", "", None, "its name must be that of a Python module"),
        ("abstract_here", "from nanovllm.scheduler.policy import Policy\nclass A(Policy): ...",
         None, r"lacks the methods first\(\), order\(seq\), push\(seq\), remove\(seq\)"),
    ],
)  # fmt: skip
def test_a_file_that_has_no_plugin(
    tmp_path: Path, name: str, code: str, class_name: str | None, message: str
) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(code)
    with pytest.raises(ConfigError, match=message):
        find_plugin(str(file), class_name)


def test_a_file_may_be_in_a_package(tmp_path: Path) -> None:
    folder = tmp_path / "my pack" / "own_pack" / "sub"
    folder.mkdir(parents=True)
    for name in ("__init__.py", "sub/__init__.py"):
        (tmp_path / "my pack" / "own_pack" / name).touch()
    (folder.parent / "base.py").write_text(PLUGIN)
    file = folder / "mine.py"
    file.write_text("from ..base import FairPolicy\nclass Mine(FairPolicy): ...")
    plugin = find_plugin(str(file))
    assert (plugin.value, plugin.folder) == ("own_pack.sub.mine:Mine", tmp_path / "my pack")


def test_the_kind_is_that_of_the_class() -> None:
    plugin = find_plugin(str(EXAMPLES / "lfu_eviction.py"))
    assert plugin.kind == EVICTION
    assert plugin.options == {"eviction_policy": "lfu_eviction:LeastFrequentlyUsed"}
