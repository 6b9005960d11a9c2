"""The adapters that a server offers as models, by name: those of its option, and those that are
loaded while it runs.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanovllm.apps.server.error_bodies import APIError
from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.options.lora_request import LoRARequest, named_adapters
from nanovllm.options.validation import shown

Run = Callable[..., Awaitable[Any]]


class Adapters:
    """Adapters by name. For the thread of the event loop.

    An id belongs to one adapter until no request has it any more, so a request that was admitted
    keeps the adapter that it named. Then another adapter gets the id: the engine knows no more
    adapters than the server ever had at once.

    Args:
        modules: of the option lora_modules.
        base_names: the names of the model itself.
        find: lets the engine read and check an adapter; raises InvalidRequestError.
        directory: below which adapters lie that may be loaded; None: none may be.

    Raises:
        ConfigError: an adapter of `modules` cannot be used.
    """

    def __init__(
        self,
        modules: Seq[str],
        base_names: Collection[str],
        find: Callable[[LoRARequest], object],
        directory: str | None = None,
    ) -> None:
        self._base_names = frozenset(base_names)
        self._find = find
        self._home = None if directory is None else Path(directory).resolve()
        self.by_name = named_adapters(modules, self._base_names)
        """Replaced when an adapter comes or goes, and never changed."""
        for adapter in self.by_name.values():
            try:
                find(adapter)
            except InvalidRequestError as error:
                raise ConfigError(f"lora_modules: {error}") from error
        # How often each id is in use: by its name, and by requests that have the adapter.
        self._num_uses = Counter(adapter.lora_int_id for adapter in self.by_name.values())

    async def load(self, name: str, path: str, run: Run, *, in_place: bool) -> None:
        """Let requests name an adapter; those that were admitted keep what they named.

        Args:
            run: waits for a function that reads files; one at a time, in the order of the calls.

        Raises:
            APIError: status 403, none may be loaded; status 404, there is no such directory; status
                400, the name is another's, or the path leads out of the server's directory.
            InvalidRequestError: the adapter cannot be used.
        """
        directory = self._below_home(path)
        self._check_name(name, in_place=in_place)
        number = next(number for number in itertools.count(1) if not self._num_uses[number])
        self._num_uses[number] += 1
        try:
            # In place, because another adapter may have had the id.
            adapter = LoRARequest(name, number, str(directory), load_inplace=True)
            await run(self._find, adapter)
            self._check_name(name, in_place=in_place)  # somebody else may have loaded it
        except BaseException:
            self._num_uses[number] -= 1
            raise
        old = self.by_name.get(name)
        self.by_name = {**self.by_name, name: dataclasses.replace(adapter, load_inplace=False)}
        if old is not None:
            self._num_uses[old.lora_int_id] -= 1

    def unload(self, name: str) -> None:
        """Let no request name an adapter any more; those that were admitted keep it.

        Raises:
            APIError: status 403, none may be unloaded; status 404, there is no such adapter.
        """
        self._check_allowed()
        found = self.by_name.get(name)
        if found is None:
            raise APIError(
                404, f"the lora adapter {shown(name)} cannot be found", param="lora_name"
            )
        self.by_name = {key: value for key, value in self.by_name.items() if key != name}
        self._num_uses[found.lora_int_id] -= 1

    @contextmanager
    def used(self, adapter: LoRARequest | None) -> Iterator[None]:
        """Keep the id of a request's adapter for this block."""
        number = 0 if adapter is None else adapter.lora_int_id
        self._num_uses[number] += 1
        try:
            yield
        finally:
            self._num_uses[number] -= 1

    def _check_name(self, name: str, *, in_place: bool) -> None:
        if name in self._base_names:
            raise APIError(
                400,
                f"the lora adapter {shown(name)} conflicts with a served base model: give it "
                "another name",
                param="lora_name",
            )
        if name in self.by_name and not in_place:
            raise APIError(
                400,
                f"the lora adapter {shown(name)} has already been loaded: to load it again, set "
                "load_inplace to true",
                param="lora_name",
            )

    def _check_allowed(self) -> Path:
        if self._home is None:
            raise APIError(
                403,
                "this server loads no adapters while it runs: start it with --enable-lora and "
                "--lora-directory, the directory below which they lie",
                code="not_allowed",
            )
        return self._home

    def _below_home(self, path: str) -> Path:
        """Return the directory that `path` leads to; links are followed."""
        home = self._check_allowed()
        try:
            found = (home / path).resolve()
            exists = found.is_relative_to(home) and found.is_dir()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a zero byte, a long name
            found = home
            exists = False
        if not found.is_relative_to(home):
            raise APIError(
                400,
                f"lora_path {shown(path)} is outside the server's lora_directory: copy the adapter "
                "into it",
                param="lora_path",
            )
        if not exists:
            raise APIError(
                404,
                f"lora_path {shown(path)} is not a directory in the server's lora_directory",
                param="lora_path",
            )
        return found
