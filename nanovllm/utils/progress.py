"""Progress bars on standard error, in a terminal or in a notebook; a log gets none."""

import sys
import time
from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm


def shows_progress() -> bool:
    """Return whether somebody watches standard error, who would see a bar move."""
    return (sys.stderr is not None and sys.stderr.isatty()) or "ipykernel" in sys.modules


def progress_bar(iterable: Iterable[Any] | None = None, *, shown: bool, **options: Any) -> Any:
    """Return a tqdm bar, which is hidden in a log and by TQDM_DISABLE=1.

    Args:
        shown: False hides it anyway.
        options: tqdm's.
    """
    hidden = (
        {} if shown and shows_progress() else {"disable": True}
    )  # disable=False outweighs TQDM_DISABLE
    return tqdm(iterable, **hidden, **options)


class QuietBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    """A bar that another library moves: none in a log, and none of less than a second."""

    def __init__(self, *args: Any, **options: Any) -> None:
        hidden = {} if shows_progress() else {"disable": True}
        super().__init__(*args, **{**options, "delay": 1, **hidden})

    def refresh(self, *args: Any, **options: Any) -> Any:
        """Show the bar, which other calls than `update` do too early."""
        is_early = self.disable or time.time() < self.start_t + self.delay
        return None if is_early else super().refresh(*args, **options)
