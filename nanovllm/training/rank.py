"""What one rank does with its weights and its KV pool when they sleep, wake up, or change.

The functions at the end are the commands of `WeightControl`. Knows no request.
"""

import weakref
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.training.memory import HeldWeights
from nanovllm.training.packets import NamedTensor, Packet
from nanovllm.training.spool import Spool
from nanovllm.training.targets import Region, Target, Targets, Weight, missing_names
from nanovllm.training.writing import is_exact, old_values, write
from nanovllm.worker.kv_pool import KVPool
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.network import Network

MAX_LISTED = 5
"""Names that one error lists."""


class TensorInfo(NamedTuple):
    """What can be checked of a tensor without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class RankWeights:
    """The weights of one rank's networks, between loading and the end."""

    def __init__(self, runner: ModelRunner) -> None:
        self._network = runner.network
        self._drafts = _draft_networks(runner)
        self._targets: Targets | None = None
        self._held: HeldWeights | None = None
        self._spool, self._draft_spool = Spool(), Spool()
        self._staged: dict[Weight, torch.Tensor] = {}
        self._filled: dict[Weight, set[Region]] = {}
        self._wanted: set[tuple[int, Region]] | None = None  # what must still come; None: nothing

    @property
    def targets(self) -> Targets:
        """What tensors fill; made when it is first asked for."""
        if self._targets is None:
            self._targets = Targets(self._network)
        return self._targets

    # Sleeping

    def sleep(self, runner: ModelRunner, level: int) -> None:
        """Give back the memory of the weights and of the KV pool.

        Args:
            level: 1 keeps the weights in a file, 2 forgets those that `load` can fill.
        """
        if runner.device.type != "cpu":
            raise ConfigError(
                "sleep() gives back the memory of a CPU only; on a GPU, use shutdown() and make a "
                "new LLM"
            )
        own, drafts = self._weights(self._network), self._weights(*self._drafts)
        if level == 2:
            _ = self.targets  # an engine whose weights cannot be filled again must keep them
        self._draft_spool.save(drafts)
        if self._wanted is None and level == 1:
            self._spool.save(own)
        else:
            self._spool.forget()
            self._want_all()
        own.give_back()
        drafts.give_back()
        for pool in self._pools():
            pool.give_back()

    def wake_weights(self) -> None:
        """Fill the weights from the file; after level 2 all must come by `load`."""
        self._draft_spool.load(self._weights(*self._drafts))
        own = self._weights(self._network)
        if self._spool.has_weights:
            self._spool.load(own)
        else:
            own.take()

    def wake_pool(self) -> None:
        """Have memory ready for the first pages of the KV pool, which are zeros."""
        for pool in self._pools():
            pool.populate_beyond(0)

    def _weights(self, *networks: Network) -> HeldWeights:
        return HeldWeights([network.model for network in networks])

    def _pools(self) -> list[KVPool]:
        networks = [self._network, *self._drafts]
        return [network.pool for network in networks if network.pool is not None]

    # Changing

    def check(self, infos: Seq[TensorInfo], whole: bool) -> None:
        """Check these tensors of an update before any is written.

        Args:
            whole: they are all of it.

        Raises:
            InvalidRequestError: one is wrong, or a part of a rounded layer is missing.
        """
        filled: dict[Weight, set[Region]] = {}
        for info in infos:
            for target in self.targets.of(*info):
                filled.setdefault(target.weight, set()).add(target.region)
        if whole:
            _require_whole(filled)

    def load(self, tensors: Seq[NamedTensor]) -> bool:
        """Write tensors to the weights, or keep them until the other parts of their layer come.

        Returns whether weights have changed.

        Raises:
            InvalidRequestError: a tensor is wrong: none of these was written.
        """
        found: list[tuple[Target, torch.Tensor]] = []
        for name, tensor in tensors:
            targets = self.targets.of(name, tuple(tensor.shape), tensor.dtype)
            found += [(target, tensor) for target in targets]
        changed = False
        for target, tensor in found:
            changed |= self._place(target, tensor)
        return changed

    def _place(self, target: Target, tensor: torch.Tensor) -> bool:
        weight = target.weight
        if weight not in self._staged:
            device = self._network.device
            self._staged[weight] = torch.zeros(weight.shape, dtype=weight.dtype, device=device)
            self._filled[weight] = set()
        target.view(self._staged[weight]).copy_(target.values(tensor.detach()))
        self._filled[weight].add(target.region)
        if self._filled[weight] < weight.regions.keys():
            return False
        self._write(weight)
        return True

    def _write(self, weight: Weight) -> None:
        self._spool.forget()
        staged = self._staged.pop(weight)
        regions = self._filled.pop(weight)
        write(weight, staged, self._network)
        if self._wanted is not None:
            self._wanted -= {(id(weight), region) for region in regions}

    def finish(self) -> list[str]:
        """Write the layers of which parts came; return the names of tensors that must still come.

        Raises:
            InvalidRequestError: a part of a rounded layer is missing.
        """
        _require_whole(self._filled)
        for weight, regions in list(self._filled.items()):
            missing = weight.regions.keys() - regions
            old = old_values(weight, self._network)
            for offset, shape in missing:
                strides = torch.empty(shape, device="meta").stride()
                part = self._staged[weight].as_strided(shape, strides, offset)
                part.copy_(old.as_strided(shape, strides, offset))
            self._write(weight)
        wanted = self._wanted
        if wanted is None:
            return []
        all_regions = {
            (id(weight), region) for weight in self.targets.weights for region in weight.regions
        }
        names = list(missing_names(self.targets.weights, all_regions - wanted))
        if not names:
            self._wanted = None
        return names

    def give_up(self, changed: bool) -> list[str]:
        """Forget what is not written yet. If some is written, all weights must come again: return
        the names.
        """
        self._staged.clear()
        self._filled.clear()
        if not changed:
            return []
        self._want_all()
        return sorted({name for weight in self.targets.weights for name in weight.regions.values()})

    def _want_all(self) -> None:
        self._wanted = {
            (id(weight), region) for weight in self.targets.weights for region in weight.regions
        }


def _require_whole(filled: dict[Weight, set[Region]]) -> None:
    """Raise InvalidRequestError for rounded layers of which only some parts came."""
    for weight, regions in filled.items():
        missing = weight.regions.keys() - regions
        if missing and not is_exact(weight):
            names = sorted({weight.regions[region] for region in missing})
            raise InvalidRequestError(
                f"update_weights: {', '.join(names[:MAX_LISTED])} missing: the layer "
                f"{weight.name.removesuffix('.weight')} is rounded as a whole, so give all its "
                "tensors in one update"
            )


def _draft_networks(runner: ModelRunner) -> list[Network]:
    """Return the networks of the drafter, if it has any."""
    values = vars(runner.drafter).values() if runner.drafter is not None else ()
    return [value for value in values if isinstance(value, Network) and value is not runner.network]


_RANKS: "weakref.WeakKeyDictionary[ModelRunner, RankWeights]" = weakref.WeakKeyDictionary()


def _of(runner: ModelRunner) -> RankWeights:
    if runner not in _RANKS:
        _RANKS[runner] = RankWeights(runner)
    return _RANKS[runner]


def sleep(runner: ModelRunner, level: int) -> None:
    """See `RankWeights.sleep`. No page of the pool may be on its way to a tier."""
    pool = runner.network.pool
    transfers = getattr(runner, "_transfers", None)
    if transfers is not None and pool is not None:
        transfers.release(range(pool.num_blocks))
    _of(runner).sleep(runner, level)


def wake_up(runner: ModelRunner, tags: Seq[str]) -> None:
    """Take back the memory of `tags`: "weights", "kv_cache" or both."""
    if "weights" in tags:
        _of(runner).wake_weights()
    if "kv_cache" in tags:
        _of(runner).wake_pool()


def check(runner: ModelRunner, infos: Seq[TensorInfo], whole: bool) -> None:
    """See `RankWeights.check`."""
    _of(runner).check(infos, whole)


def load(runner: ModelRunner, tensors: Seq[NamedTensor | Packet]) -> bool:
    """See `RankWeights.load`. Ranks in other processes get packets."""
    named = [each.unpacked() if isinstance(each, Packet) else each for each in tensors]
    return _of(runner).load(named)


def finish(runner: ModelRunner) -> list[str]:
    """See `RankWeights.finish`."""
    return _of(runner).finish()


def give_up(runner: ModelRunner, changed: bool) -> list[str]:
    """See `RankWeights.give_up`."""
    return _of(runner).give_up(changed)
