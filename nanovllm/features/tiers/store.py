"""The byte store that the options ask for: a directory, or the user's."""

import logging
from collections.abc import Callable, Sequence as Seq
from typing import Any

from nanovllm.features.tiers.directory import DirectoryStore
from nanovllm.features.tiers.tier import ByteStore
from nanovllm.options.config import Config
from nanovllm.options.plugins import at_start, load_class

logger = logging.getLogger(__name__)


class CheckedStore(ByteStore):
    """A store from outside of the package: what it raises is logged, once, and counts as a miss.

    Args:
        store: the one that keeps entries.
        name: for the log, `kv_store="module:Class"`.
    """

    def __init__(self, store: ByteStore, name: str) -> None:
        self._store = store
        self._name = name
        self._warned = False

    def has(self, key: bytes) -> bool:
        return bool(self._asked("has()", self._store.has, key))

    def read(self, key: bytes, buffers: Seq[memoryview]) -> bool:
        return bool(self._asked("read()", self._store.read, key, buffers))

    def write(self, key: bytes, buffers: Seq[memoryview]) -> None:
        self._asked("write()", self._store.write, key, buffers)

    def close(self) -> None:
        self._asked("close()", self._store.close)

    def _asked(self, call: str, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except (Exception, SystemExit) as error:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            reason = f"{call} raised {type(error).__name__}: {error}"
            logger.log(level, "%s: %s; what it should give is computed", self._name, reason)
            return None


def store_class(value: str) -> type[ByteStore]:
    """Return the class that the option kv_store names, "module:Class".

    Raises:
        ConfigError: there is no such class.
    """
    return load_class("kv_store", value, ByteStore, ("namespace", "rank"))  # type: ignore[type-abstract]


def make_store(config: Config, namespace: str, rank: int = 0) -> ByteStore | None:
    """Return the store that the options ask for; None for none.

    Args:
        namespace: see `kv_namespace`.

    Raises:
        ConfigError: it cannot be made.
    """
    if config.kv_store is not None:
        name = f'kv_store="{config.kv_store}"'
        found = store_class(config.kv_store)
        return CheckedStore(at_start(name, "__init__()", found, namespace, rank), name)
    if config.kv_cache_dir is not None:
        limit = int(config.kv_cache_dir_gib * 2**30)
        return DirectoryStore(config.kv_cache_dir, limit, namespace, rank)
    return None
