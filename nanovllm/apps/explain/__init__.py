"""`nanovllm explain`: what the engine does, step by step. Stands on `LLM`."""

from typing import Annotated

from nanovllm.errors import ConfigError
from nanovllm.options.validation import check_int, check_path, checked_dataclass


@checked_dataclass(ConfigError)
class ExplainOptions:
    """What is shown of the steps, and where.

    Raises:
        ConfigError: a field is unknown, of the wrong type or out of range.
    """

    html: Annotated[str | None, check_path, "a file or None"] = None
    """File for one page that shows the steps in a browser, without a network; an existing file is
    overwritten. None is the terminal."""
    num_top: Annotated[int, check_int, 1, 100] = 6
    """Number of the likeliest tokens that are shown of a sample, before and after the rules."""
