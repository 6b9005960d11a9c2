"""TRL's asynchronous GRPO against a server of nanovllm, end to end on the shipped model."""

import importlib.util
import sys

import pytest

from tests.helpers import ROOT

if importlib.util.find_spec("trl") is None:
    pytest.skip("TRL is not installed", allow_module_level=True)

sys.path.append(str(ROOT / "examples"))
from async_grpo_trl import train


@pytest.mark.long
@pytest.mark.parametrize("lora", [False, True], ids=["weights", "adapter"])
def test_rewards_rise(lora: bool) -> None:
    """All weights by gloo, or an adapter's files; TRL's own code calls the server.

    How old the rollouts are depends on what else runs, so one run of two may be unlucky.
    """
    for _ in range(2):
        rewards = train(20, lora=lora)
        assert len(rewards) == 20
        first, last = sum(rewards[:3]) / 3, sum(rewards[-6:]) / 6
        if last > first + 0.02:
            return
    pytest.fail(f"the rewards do not rise: {rewards}")
