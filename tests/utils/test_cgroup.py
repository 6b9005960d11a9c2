"""The groups whose limits hold for a process, as the system names them in different places."""

from pathlib import Path

import pytest

from nanovllm.utils import cgroup

SERVICE = ["system.slice/nanovllm.service", "system.slice", ""]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0::/system.slice/nanovllm.service\n", [*SERVICE, "memory"]),
        (
            "5:cpu,cpuacct:/other\n4:memory:/docker/ab\n0::/\n",
            ["", "memory/docker/ab", "memory/docker", "memory"],
        ),
        ("0::/../../user.slice\n", ["", "memory"]),
        (None, ["", "memory"]),
    ],
    ids=["systemd", "version 1", "outside of the namespace", "no cgroups"],
)
def test_a_limit_of_each_group_up_to_the_root_counts(
    own: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Symptom: MemoryMax of a systemd unit was not seen, and the KV pool was as for the machine."""
    file = tmp_path / "cgroup"
    if own is not None:
        file.write_text(own)
    monkeypatch.setattr(cgroup, "_OWN", file)
    assert cgroup.groups("memory") == [cgroup._ROOT / path for path in expected]
