"""`OwnerProcess`: the process that an engine belongs to. A forked one has only a copy."""

import os

from nanovllm.errors import EngineDeadError


class OwnerProcess:
    """The process that makes this object.

    An engine's threads, worker processes and GPU stay with it.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """Whether this process is it, and not one forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise EngineDeadError in a forked process."""
        if not self.is_this:
            raise EngineDeadError(
                f"the engine belongs to process {self._pid}, and this is process {os.getpid()}, "
                'forked from it: use multiprocessing\'s "spawn" and make the LLM in the new process'
            )
