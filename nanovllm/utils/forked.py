"""What a forked process must not keep: while it has a copy of a pipe, nobody at the other end sees
that this process is gone. Imports no torch.
"""

import os
import weakref
from collections.abc import Callable


def call_in_forked(method: Callable[[], None]) -> None:
    """Call `method`, of an object, in each process that is forked while the object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    os.register_at_fork(after_in_child=call)
