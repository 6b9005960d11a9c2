"""The seam between the executor and the processes that run the ranks: how they start, how messages
go, how they end. pipes.py spawns processes of this machine; ray_ranks.py has Ray place actors.

Knows no schedule and no result.
"""

from typing import Any, Protocol


class Ranks(Protocol):
    """The processes of ranks 0 to size - 1, each with a way for messages in both directions.

    A rank first sends what it can hold. Every message of a rank is ("ok", value) or
    ("error", exception).
    """

    size: int

    def start(self) -> None:
        """Start all ranks. `end` has to be called even if this raises.

        Raises:
            NanoVLLMError: the ranks cannot be started with these options.
        """
        ...

    def send(self, rank: int, message: Any) -> None:
        """Send `message` to `rank`.

        Raises:
            OSError: the rank has ended.
        """
        ...

    def wait(self) -> list[int]:
        """Wait until a rank has sent a message or has ended. Return the ranks to receive from."""
        ...

    def receive(self, rank: int) -> Any:
        """Return the next message of `rank`.

        Raises:
            EOFError, OSError: the rank has ended.
        """
        ...

    def alive(self) -> bool:
        """Return whether no rank has ended."""
        ...

    def endings(self) -> list[str]:
        """Say of each rank that has ended which it was and how, for an error's message.

        Waits for two seconds at most: messages stop shortly before a process is gone.
        """
        ...

    def end(self, *, at_once: bool = False) -> None:
        """End all ranks and give back what they hold. Repeated calls do nothing.

        Args:
            at_once: kill the ranks; otherwise they have five seconds to end by themselves.
        """
        ...
