"""Progress bars on standard error: live at a terminal, one line in a log.

Knows nothing of what takes its time.
"""

import math
import sys
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


class _Bar(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
    def close(self) -> None:
        """Show the last state, if anything is shown at all."""
        if not self.disable:
            self.mininterval = 0
            self.update(0)
        super().close()


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool, **options: Any) -> Any:
    """Return a tqdm bar, which TQDM_DISABLE=1 hides. A log gets its last state only.

    Args:
        shown: False hides it anyway.
        options: tqdm's.
    """
    hidden = {} if shown else {"disable": True}  # disable=False would outweigh TQDM_DISABLE
    is_live = (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules
    return _Bar(iterable, mininterval=0.1 if is_live else math.inf, **hidden, **options)
