"""Progress bars on standard error, in a terminal or in a notebook; a log gets none."""

import sys
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
