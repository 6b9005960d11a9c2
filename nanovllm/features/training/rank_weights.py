"""What one rank does with its weights and its KV pool when they sleep, wake up, or change.

A part of the model runner, see `on_weights`.
"""

import functools
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from typing import Any, NamedTuple

import torch

from nanovllm.errors import ConfigError, InvalidRequestError
from nanovllm.features.training.memory import HeldWeights, Spool
from nanovllm.features.training.packets import NamedTensor, Packet
from nanovllm.features.training.targets import Region, ShardTarget, Targets, Weight
from nanovllm.features.training.writing import is_exact, old_values, write
from nanovllm.options.validation import listed
from nanovllm.utils.memory import return_freed
from nanovllm.worker.kv_pool import KVPool
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.network import Network

_TRIM_EVERY = 2**24
"""Numbers that were written."""
MAX_LISTED = 5
"""Names that one error lists."""


class NewTensor(NamedTuple):
    """What can be checked of a tensor without its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class RankWeights:
    """The weights of one rank's networks, between loading and the end."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = weakref.ref(runner)
        self._network = runner.network
        self._drafts = [] if runner.drafter is None else runner.drafter.networks
        self._spool = Spool()
        self._draft_spool = Spool()
        self._is_kept = False  # by `keep`
        self._staged: dict[Weight, torch.Tensor] = {}  # not written yet
        self._given: defaultdict[Weight, set[Region]] = defaultdict(set)  # in this update
        self._is_changed = False  # in this update
        self._num_freed = 0
        self._wanted: dict[tuple[Weight, Region], str] = {}  # tensors that must still come

    @functools.cached_property
    def targets(self) -> Targets:
        """What tensors fill; made when it is first asked for."""
        return Targets(self._network)

    # Sleeping

    def keep(self, level: int) -> None:
        """Prepare for `sleep`.

        Args:
            level: 1 keeps the weights in a file, 2 forgets those that `load` can fill.

        Raises:
            ConfigError, UnsupportedModelError: this rank cannot; its weights are as they were.
        """
        if not self._network.platform.in_host_memory:
            raise ConfigError(
                "sleep() gives back the memory of a CPU only; on a GPU, use shutdown() and make a "
                "new LLM"
            )
        if level == 2:
            _ = self.targets  # an engine whose weights cannot be filled again must keep them
        self._draft_spool.save(self._weights(*self._drafts))
        self._is_kept = not self._wanted and level == 1
        if self._is_kept:
            self._spool.save(self._weights(self._network))

    def sleep(self) -> None:
        """Give back the memory of the weights and of the KV pool, after `keep`.

        That of tiers and of adapters is given back, too.
        """
        runner = self._runner()
        assert runner is not None, "it calls this"
        runner.give_back()
        if not self._is_kept:
            self._spool.forget()
        self._weights(self._network).give_back()
        self._weights(*self._drafts).give_back()
        for pool in self._pools():
            pool.give_back()

    def wake_up(self, tags: Seq[str]) -> None:
        """Take back the memory of `tags`: "weights", "kv_cache" or both.

        The weights are filled from the file; after level 2 all must come by `load`. The first pages
        of the KV pool are zeros.
        """
        if "weights" in tags:
            if not self._is_kept:
                self._want_all()
            self._draft_spool.load(self._weights(*self._drafts))
            self._spool.load(self._weights(self._network))
        if "kv_cache" in tags:
            for pool in self._pools():
                pool.populate_beyond(0)

    def _weights(self, *networks: Network) -> HeldWeights:
        models = [network.model for network in networks]
        models += [each.model for network in networks for each in network.companions]
        return HeldWeights(models)

    def _pools(self) -> list[KVPool]:
        return [network.pool for network in (self._network, *self._drafts)]

    # Changing

    def check(self, infos: Seq[NewTensor], whole: bool, every: bool = False) -> None:
        """Check these tensors of an update before any is written.

        Args:
            whole: they are all of it.
            every: they must be all that the model has.

        Raises:
            InvalidRequestError: one is wrong, or a part of a rounded layer is missing, or a tensor.
        """
        filled: defaultdict[Weight, set[Region]] = defaultdict(set)
        for target in itertools.chain.from_iterable(
            self._targets_of(infos, {} if whole else self._given)
        ):
            filled[target.weight].add(target.region)
        missing = [
            name
            for weight in self.targets.weights
            for region, name in weight.regions.items()
            if region not in filled.get(weight, ())
        ]
        if every and missing:
            raise InvalidRequestError(
                f"update_weights: the files lack {listed(missing, MAX_LISTED)}, which would keep "
                "the values of before: give files with all tensors of the model; or, if a part is "
                "meant, call start_weight_update before and finish_weight_update after it"
            )
        if whole:
            _require_whole(filled)

    def _targets_of(
        self, infos: Seq[NewTensor], before: Mapping[Weight, set[Region]]
    ) -> list[list[ShardTarget]]:
        """Return what each tensor fills; refuse one that fills what another of the update fills.

        Args:
            before: what the update has filled.
        """
        found = [self.targets.of(*info) for info in infos]
        given = {(weight, region) for weight, own in before.items() for region in own}
        for info, targets in zip(infos, found, strict=True):
            places = {(target.weight, target.region) for target in targets}
            if not given.isdisjoint(places):
                raise InvalidRequestError(
                    f"update_weights: {info.name} comes twice in one update; give each tensor once"
                )
            given |= places
        return found

    def load(self, items: Seq[NamedTensor | Packet]) -> None:
        """Write tensors to the weights, or keep them until the other parts of their layer come.

        Ranks in other processes get packets.

        Raises:
            InvalidRequestError: a tensor is wrong: none of these was written.
        """
        tensors = [each.unpacked() if isinstance(each, Packet) else each for each in items]
        infos = [NewTensor(name, tuple(x.shape), x.dtype) for name, x in tensors]
        for (_, tensor), targets in zip(tensors, self._targets_of(infos, self._given), strict=True):
            for target in targets:
                self._place(target, tensor)

    def _place(self, target: ShardTarget, tensor: torch.Tensor) -> None:
        weight = target.weight
        if weight not in self._staged:
            device = self._network.device
            self._staged[weight] = torch.zeros(weight.shape, dtype=weight.dtype, device=device)
        target.view(self._staged[weight]).copy_(target.values(tensor.detach()))
        self._given[weight].add(target.region)
        if self._given[weight] >= weight.regions.keys():
            self._write(weight)

    def _write(self, weight: Weight) -> None:
        self._is_changed = True
        self._spool.forget()
        staged = self._staged.pop(weight)
        write(weight, staged, self._network)
        self._num_freed += staged.numel()
        if self._num_freed >= _TRIM_EVERY:  # else malloc keeps as much as the weights have
            return_freed()
            self._num_freed = 0
        for region in self._given[weight]:
            self._wanted.pop((weight, region), None)

    def finish(self) -> list[str]:
        """Write the layers of which parts came; return the names of tensors that must still come.

        Raises:
            InvalidRequestError: a part of a rounded layer is missing.
        """
        _require_whole({weight: self._given[weight] for weight in self._staged})
        for weight in list(self._staged):
            missing = weight.regions.keys() - self._given[weight]
            old = old_values(weight, self._network)
            for offset, shape in missing:
                strides = torch.empty(shape, device="meta").stride()
                part = self._staged[weight].as_strided(shape, strides, offset)
                part.copy_(old.as_strided(shape, strides, offset))
            self._write(weight)
        return self._missing

    def settle(self) -> None:
        """End an update whose end the engine knows of."""
        self._is_changed = False
        self._given.clear()

    def give_up(self) -> list[str]:
        """End an update that has failed, if one runs. If some of it is written, all weights must
        come again. Return the names of tensors that must still come.
        """
        if self._is_changed:
            self._want_all()
        self._staged.clear()
        self.settle()
        return self._missing

    @property
    def _missing(self) -> list[str]:
        return sorted(set(self._wanted.values()))

    def _want_all(self) -> None:
        self._wanted = {
            (weight, region): name
            for weight in self.targets.weights
            for region, name in weight.regions.items()
        }


def _require_whole(filled: Mapping[Weight, set[Region]]) -> None:
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


def on_weights(runner: ModelRunner, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of the rank's weights, which are made when they are first asked for."""
    if runner.weights is None:
        runner.weights = RankWeights(runner)
    return method(runner.weights, *arguments)
