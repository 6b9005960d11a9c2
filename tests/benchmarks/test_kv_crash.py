"""benchmarks/kv_crash.py: a few rounds of each part."""

from pathlib import Path

import pytest

from benchmarks.kv_crash import DAMAGES, PARTS, Checker
from nanovllm.features.tiers.traffic import TierTraffic

ROUNDS = {"crashes": 2, "corruptions": len(DAMAGES), "together": 1}
WARNED = ("full disk", "read-only disk")


@pytest.fixture(scope="module")
def checker():
    before = TierTraffic.pays
    yield Checker()
    TierTraffic.pays = before


@pytest.mark.parametrize("part", PARTS)
def test_nobody_notices(checker: Checker, tmp_path: Path, part: str) -> None:
    run, _ = PARTS[part]
    tally = run(checker, ROUNDS.get(part, 2), tmp_path)
    if tally is None:
        pytest.skip("this process may not mount a file system")
    assert tally.passed, tally
    assert tally.warnings == (tally.rounds if part in WARNED else 0)
    if part != "together":  # one engine may remove what another has found
        assert (tally.failed_loads > 0) == (part == "corruptions")
