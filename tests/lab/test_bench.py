"""`nanovllm lab bench`: what pairs show, what a round counts, and two processes that take turns."""

import json
import math
import random
from pathlib import Path

import pytest

from nanovllm import demo_model
from nanovllm.apps.cli import main as cli
from nanovllm.apps.lab.bench import ENGINE, MEASURES, Bench, show
from nanovllm.apps.lab.player import Player
from nanovllm.apps.lab.plot import draw
from nanovllm.apps.lab.ratio import NOTHING, SLOWER, fewest_pairs, ratio_of
from nanovllm.apps.lab.workloads import AGENTS, POISSON, PREFIXES, WORKLOADS, make
from nanovllm.errors import ConfigError
from tests.helpers import ROOT

ERROR = 0.05 / len(MEASURES)


def test_the_interval_is_that_of_the_tables() -> None:
    """Hollander and Wolfe: with 10 pairs, the 9th mean of each end is of 95.1%."""
    logs = [math.log(1 + 0.01 * n * n) for n in range(10)]
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    found = ratio_of(logs, 0.049)
    assert math.log(found.low) == pytest.approx(means[8])
    assert math.log(found.high) == pytest.approx(means[-9])
    assert found.verdict == SLOWER


def test_fewer_pairs_show_nothing() -> None:
    assert fewest_pairs(0.05) == 6
    ratio_of([0.1] * 6, 0.05)
    with pytest.raises(AssertionError, match="5 pairs are too few"):
        ratio_of([0.1] * 5, 0.05)


def noise(rng: random.Random) -> float:
    """A process that is faster or slower for good, and bursts of others' work."""
    return rng.gauss(0, 0.01) + (rng.random() < 0.2) * rng.expovariate(5)


def test_no_difference_is_shown_where_there_is_none() -> None:
    """And 5% is found. Symptom: a t-test of rounds in one pair of processes finds 1% each time."""
    rng, alarms, found = random.Random(0), 0, 0
    for _ in range(150):
        pairs = [[noise(rng) - noise(rng) for _ in range(10)] for _ in MEASURES]
        alarms += any(ratio_of(logs, ERROR).verdict != NOTHING for logs in pairs)
        slowed = [[log + math.log(1.05) for log in logs] for logs in pairs]
        found += any(ratio_of(logs, ERROR).verdict == SLOWER for logs in slowed)
    assert alarms <= 15
    assert found >= 135


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time(name: str) -> None:
    assert make(name, 100) == make(name, 100)
    assert all(request.max_tokens > 1 for request in make(name, 100))


def made_up(*, factor: float) -> Bench:
    """A bench of two workloads in which the plugin takes `factor` times as long."""
    rng = random.Random(3)

    def pair(times: float) -> list[dict[str, object]]:
        fields = ("seconds", "latency", "first_token", "next_token")
        return [
            {**{field: times * rng.uniform(0.99, 1.01) for field in fields}, "counts": {"steps": 7}}
            for _ in range(2)
        ]

    names = list(WORKLOADS)[:3]
    rounds = {name: ([pair(1) for _ in "0123456789"], [pair(factor) for _ in "0123456789"])
              for name in names}  # fmt: skip
    return Bench("m", "scheduling_policy=m:C", 10, 2, {}, rounds, 1.0)


def test_the_table_says_what_is_slower() -> None:
    assert sum(line.endswith("  slower") for line in show(made_up(factor=1.05))) == 4
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


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "bench.svg"
    draw(made_up(factor=1.05), str(file))
    assert file.read_text().count("<path") > 40  # a line for each of 10 pairs, four times
    with pytest.raises(ConfigError, match="plot .* cannot be written"):
        draw(made_up(factor=1.05), str(tmp_path / "no" / "bench.svg"))


def test_a_round_counts_what_the_policy_computes() -> None:
    """Prompts with one prefix come together, so fewer of their tokens are computed."""
    found = []
    for policy in ("priority", "examples.lab.longest_prefix_first:LongestPrefixFirst"):
        player = Player(demo_model.MODEL, {**ENGINE, "scheduling_policy": policy})
        first, second = (player.play(PREFIXES, 0.0) for _ in range(2))
        assert first.counts == second.counts
        assert 0 < first.first_token < first.latency < first.seconds
        found.append(first.counts["prompt tokens computed"])
        player.engine.shutdown()
    assert found[1] < 0.95 * found[0]


def test_arrivals_and_turns() -> None:
    """The clock skips the time in which no request runs; a turn follows the answer before it."""
    player = Player(demo_model.MODEL, ENGINE)
    far, turns = player.play(POISSON, 100.0), player.play(AGENTS, 0.0)
    player.engine.shutdown()
    assert far.latency < far.seconds < 60
    assert turns.counts["prompt tokens cached"] > turns.counts["prompt tokens computed"]


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prefixes: the counts of two processes are exact, and the policy computes fewer tokens."""
    file = ROOT / "examples/lab/longest_prefix_first.py"
    output = tmp_path / "found.json"
    few = ["--num-pairs", "6", "--num-rounds", "1", "--workloads", "prefixes"]
    few += ["--output", str(output)]
    assert cli.main(["lab", "bench", str(file), demo_model.MODEL, *few]) == 0
    found = json.loads(output.read_text())
    (counted,) = [each for each in found["counts"] if each[1] == "prompt tokens computed"]
    assert counted[3] < counted[2]
    assert "prompt tokens computed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-pairs", "5"], "--num-pairs must be at least 9 for 7 comparisons"),
        (["--workloads", "sideways"], "'sideways' is in no workload's name; they are: nano-vllm's"),
        (["--output", "/none/a.json"], "--output '/none/a.json' cannot be written: name a file in"),
        (["no.py"], "FILE 'no.py' is not a file"),
    ],
)
def test_bad_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["lab", "bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_plugin_that_fails_ends_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--class", "LosesPages", "--num-pairs", "6", "--workloads", "prefixes"]
    assert cli.main(["lab", "bench", str(ROOT / "tests/lab/twins.py"), *arguments]) == 2
    assert "--eviction-policy twins:LosesPages: after put_last" in capsys.readouterr().err
