"""Where the limits of this process's control groups stand, of version 1 or 2."""

from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def groups(controller: str) -> list[Path]:
    """Return the directories of the groups that this process is in, from the innermost to the root.

    A limit of any of them holds. Some may be missing: in a container the root is the container's
    group, and the names of those below it may be the host's.

    Args:
        controller: "memory" or "cpu".
    """
    paths = {_ROOT: "", _ROOT / controller: ""}
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:  # another system
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[_ROOT] = path
        elif controller in controllers.split(","):
            paths[_ROOT / controller] = path
    found = []
    for root, path in paths.items():
        names = [name for name in path.split("/") if name]
        if ".." in names:  # outside of what this process sees
            names = []
        found += [root.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
    return found
