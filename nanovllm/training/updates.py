"""Takes a trainer's iterator apart into commands for an engine.

The iterator runs in the caller's thread, the commands between two steps. Knows no rank.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from nanovllm.training.control import WeightControl, check_version
from nanovllm.training.packets import checked, in_messages

Command = Callable[[], Any]


class Update:
    """An update, or a part of one that has begun. See `WeightMethods.update_weights`.

    Raises:
        InvalidRequestError: `version` is neither an int nor a str.
    """

    def __init__(
        self,
        control: WeightControl,
        weights: Iterable[Any] | Mapping[str, Any],
        version: int | str | None,
        mode: str,
    ) -> None:
        check_version(version)
        self._control = control
        self._version, self._mode = version, mode
        self._is_part = control.is_updating
        self._items: Iterable[Any] = weights.items() if isinstance(weights, Mapping) else weights
        self._is_there = isinstance(weights, Mapping | list | tuple)

    def commands(self) -> Iterator[Command]:
        """Yield the commands; each must have returned before the next is asked for.

        If the iterator or a command fails, closing this generator ends the update.
        """
        control, items = self._control, self._items
        if self._is_there:
            items = [checked(item) for item in items]
            yield partial(control.check, items, not self._is_part)
        if not self._is_part:
            yield partial(control.start, self._mode)
        for message in in_messages(map(checked, items)):
            yield partial(control.load, message)
        if not self._is_part:
            yield partial(control.finish, self._version)
