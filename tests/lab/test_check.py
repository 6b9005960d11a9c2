"""`nanovllm lab check`: right plugins pass, and each broken twin is found by the check for it."""

import builtins
import re
from typing import Any

import pytest

from nanovllm import demo_model, errors
from nanovllm.apps.cli import main as cli
from nanovllm.apps.lab.check import Finding, _guarded, _proof, check
from nanovllm.apps.lab.plugin import CheckOptions, find_plugin
from nanovllm.apps.prove import ProveOptions
from nanovllm.errors import ConfigError
from nanovllm.kernels.cpu.library import library

SHORTEST = "examples.lab.shortest_job_first:ShortestFirst"
LFU = "examples.lab.lfu_eviction:LeastFrequentlyUsed"
SHORT = {"max_model_len": 128}
PROVE = ProveOptions(num_requests=4, ways=("preempted",))


def checked(plugin: str, **options: Any) -> dict[str, Finding]:
    how = CheckOptions(**{"num_runs": 20, **options})
    return {
        each.name: each for each in check(find_plugin(plugin), demo_model.MODEL, SHORT, how, PROVE)
    }


@pytest.fixture
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.apps.lab.check._proof", lambda *_: (True, ""))


def test_a_right_plugin_passes() -> None:
    found = checked(LFU)
    assert all(finding.holds for finding in found.values()), found
    assert "2 ways" in found["the same bits"].words


@pytest.mark.usefixtures("without_engine")
@pytest.mark.parametrize(
    "plugin", [SHORTEST, "examples.lab.longest_prefix_first:LongestPrefixFirst"]
)
def test_a_right_policy_passes(plugin: str) -> None:
    found = checked(plugin)
    assert all(finding.holds for finding in found.values()), found


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The calls that fail are shown."""
    plugin = "tests.lab.twins:LosesPages"
    arguments = ["--num-runs", "20", "--ways", "preempted"]
    assert cli.main(["lab", "check", plugin, demo_model.MODEL, *arguments]) == 1
    out = capsys.readouterr().out
    assert re.search(
        r"^random calls +FAILS.* it holds \[.*\], and \[.*\] are free", out, re.MULTILINE
    )
    assert re.search(r"^    state\.let_go\(.*is_filled=True", out, re.MULTILINE)
    assert out.endswith("eviction_policy tests.lab.twins:LosesPages breaks rules: 1 of 1 tried.\n")


@pytest.mark.parametrize(
    ("name", "where", "words"),
    [
        ("NeverAges", "a long request among short ones", "it starves: after 500 more requests"),
        ("AsksTheClock", "random runs", "order"),
        ("PreemptsTheFirst", "random runs", "starves|waiting requests never run"),
        ("LongestPrefixOnly", "a request among others with one prefix", "it starves"),
        ("ForgetsHits", "hits", "it keeps less than an order that takes any page"),
        ("TakesWhatIsHeld", "random calls", "which holds something|first of iter"),
    ],
)
@pytest.mark.usefixtures("without_engine")
def test_a_broken_twin_is_found(name: str, where: str, words: str) -> None:
    # Which run fails first depends on the modules that are imported: Hypothesis draws constants of
    # their code, too. It ends the check.
    num_runs = 400 if where.startswith("random") else 20
    found = checked(f"tests.lab.twins:{name}", num_runs=num_runs)
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


@pytest.mark.skipif(library() is None, reason="an 8-bit KV cache needs the C kernels")
def test_the_ways_of_another_setting_are_counted() -> None:
    """Symptom: KeyError: ''."""
    ways = ProveOptions(num_requests=4, ways=("int8 KV, warm",))
    holds, words = _proof(find_plugin(LFU), demo_model.MODEL, {}, ways)
    assert holds, words
    assert words.startswith("4 requests, 1 way as")


@pytest.mark.usefixtures("without_engine")
def test_users_may_have_to_take_turns() -> None:
    found = checked(SHORTEST, fair=True)["users take turns"]
    assert not found.holds
    assert "gets 90% beside one with two" in found.words


def test_an_engine_that_a_twin_ends_is_a_finding() -> None:
    """Symptom: `lab check` ends with a traceback where the plugin ends the engine."""
    plugin = find_plugin("tests.lab.twins:CannotRevive")
    holds, words = _guarded(lambda: _proof(plugin, demo_model.MODEL, {}, PROVE))
    assert not holds
    assert 'eviction_policy="tests.lab.twins:CannotRevive": remove() raised KeyError: 7' in words


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("lfu_eviction.py", 'PLUGIN must be a class of yours as "module:Class", got'),
        ("no_such_module:A", "no_such_module cannot be imported"),
        ("examples.lab.lfu_eviction:C", "has no C"),
        ("nanovllm.scheduler.heap:Heap", "must name a class derived from nanovllm.sched"),
        ("nanovllm.scheduler.policy:Policy", r"lacks the methods first\(\), order\(seq\), push"),
    ],
)
def test_what_is_no_plugin(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_plugin(value)
