"""`nanovllm lab bench`: what pairs show, what a round counts, and two processes that take turns."""

import json
import random
from pathlib import Path

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.lab.bench import (
    ENGINE,
    FASTER,
    NOTHING,
    SLOWER,
    Bench,
    fewest_pairs,
    ratio_of,
    show,
)
from nanovllm.apps.lab.player import Player
from nanovllm.apps.lab.workloads import WORKLOADS, make


def test_the_interval_is_that_of_the_sign_test() -> None:
    """Of 10 fair coins at most 1 falls on a side with a probability of 11 / 1024."""
    ratios = [1.01, 0.99, 1.02, 1.03, 1.05, 1.05, 1.06, 1.07, 1.08, 1.09]
    assert ratio_of(ratios, 22 / 1024) == (1.05, 1.01, 1.08)
    assert ratio_of(ratios, 22 / 1024).verdict == SLOWER
    assert ratio_of(ratios, 21 / 1024) == (1.05, 0.99, 1.09)
    assert ratio_of(ratios, 21 / 1024).verdict == NOTHING
    assert ratio_of([1 / each for each in ratios], 22 / 1024).verdict == FASTER
    assert fewest_pairs(0.05) == 6


def test_no_difference_is_shown_where_there_is_none() -> None:
    """In 19 of 20 benches, also of processes that are faster or slower for good."""
    rng, alarms, found = random.Random(0), 0, 0
    for _ in range(200):
        pairs = [[rng.lognormvariate(0, 0.02) for _ in range(10)] for _ in range(8)]
        alarms += any(ratio_of(each, 0.05 / 8).verdict != NOTHING for each in pairs)
        slowed = [[1.08 * ratio for ratio in each] for each in pairs]
        found += all(ratio_of(each, 0.05 / 8).verdict == SLOWER for each in slowed)
    assert alarms <= 10
    assert found >= 190


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    assert make(name, 100) == make(name, 100)


def made_up(*, factor: float) -> Bench:
    """A bench of two workloads in which the plugin takes `factor` times as long."""
    rng = random.Random(3)

    def pair(times: float) -> list[dict[str, object]]:
        fields = ("seconds", "latency")
        return [
            {**{field: times * rng.uniform(0.99, 1.01) for field in fields}, "counts": {"steps": 7}}
            for _ in range(2)
        ]

    names = list(WORKLOADS)[:3]
    rounds = {name: ([pair(1) for _ in "0123456789"], [pair(factor) for _ in "0123456789"])
              for name in names}  # fmt: skip
    return Bench("m", "scheduling_policy=m:C", {}, rounds)


def test_the_table_says_what_is_slower() -> None:
    assert sum(line.endswith("  slower") for line in show(made_up(factor=1.05))) == 6
    *_, last = show(made_up(factor=1.0))
    assert last.startswith("No difference shown; none is larger than ")


def test_no_count_is_left_out() -> None:
    """Symptoms: a count that varies is not shown, and 3 beside 0 is three times as many."""
    bench = made_up(factor=1.0)
    for default, plugin in bench.rounds.values():
        for number, (own, other) in enumerate(zip(default, plugin, strict=True)):
            own[0]["counts"] = own[1]["counts"] = {"steps": 7, "preemptions": 0, "same": 5}
            other[0]["counts"] = other[1]["counts"] = {
                "steps": 8 + number,
                "preemptions": 3,
                "same": 5,
            }
    steps, preemptions = (
        next(line for line in show(bench) if f" {what} " in line)
        for what in ("steps", "preemptions")
    )
    assert steps.split()[-6:] == ["7", "12", "1.714", "median:", "rounds", "differ"]
    assert preemptions.split()[-4:] == ["0", "3", "new", "exact"]
    assert not any(" same " in line for line in show(bench))


def test_a_round_counts_what_the_policy_computes() -> None:
    """Prompts with one prefix come together, so fewer of their tokens are computed."""
    found = []
    for policy in ("priority", "examples.lab.longest_prefix_first:LongestPrefixFirst"):
        player = Player(demo_model.MODEL, {**ENGINE, "scheduling_policy": policy})
        first, second = (player.play("shared prefixes") for _ in range(2))
        assert first.counts == second.counts
        assert 0 < first.latency < first.seconds
        found.append(first.counts["prompt tokens computed"])
        player.engine.shutdown()
    assert found[1] < 0.95 * found[0]


def test_a_turn_follows_the_answer_before_it() -> None:
    player = Player(demo_model.MODEL, ENGINE)
    turns = player.play("agents' turns")
    player.engine.shutdown()
    assert turns.counts["prompt tokens cached"] > turns.counts["prompt tokens computed"]


@pytest.fixture
def few_pairs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return flags for two pairs, which can show a difference if errors are frequent."""
    monkeypatch.setattr("nanovllm.apps.lab.bench._ERROR", 1.0)
    return ["--num-pairs", "2", "--num-rounds", "1", "--workloads", "prefixes"]


@pytest.mark.long
def test_the_command(
    tmp_path: Path, few_pairs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Prefixes: the counts of two processes are exact, and the policy computes fewer tokens."""
    plugin = "examples.lab.longest_prefix_first:LongestPrefixFirst"
    output = tmp_path / "found.json"
    arguments = [plugin, demo_model.MODEL, *few_pairs, "--output", str(output)]
    assert cli.main(["lab", "bench", *arguments]) == 0
    found = json.loads(output.read_text())
    (counted,) = [each for each in found["counts"] if each[1] == "prompt tokens computed"]
    assert counted[3] < counted[2]
    assert "prompt tokens computed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-pairs", "5"], "--num-pairs must be at least 9 for 8 comparisons"),
        (["--workloads", "sideways"], "'sideways' is in no workload's name; they are: nano-vllm's"),
        (["--output", "/none/a.json"], "--output '/none/a.json' cannot be written: name a file in"),
        (["no.py"], "PLUGIN must be"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_plugin_that_fails_ends_the_bench(
    few_pairs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "bench", "tests.lab.twins:CannotRevive", *few_pairs]) == 2
    assert "remove() raised KeyError: 7" in capsys.readouterr().err
