"""`WeightFormat`: which weights of a model are stored in another form, and in which.

One file a format; registry.py knows them all. Knows no file.
"""

from typing import Protocol

from nanovllm.layers.extensions import StoredWeight
from nanovllm.layers.linear import Matrix


class WeightFormat(Protocol):
    """How the weights of a checkpoint are stored.

    A format that `quantization_config` names is made of that. It raises UnsupportedModelError for a
    setting that is not implemented, and CheckpointError for a field of the wrong type.
    """

    @property
    def name(self) -> str:
        """Return the name that errors show: "FP8"."""
        ...

    def stored(self, matrix: Matrix, names: list[str]) -> StoredWeight | None:
        """Return how the weight of `matrix` is stored; None: as plain numbers.

        The shape [n, k], dtype and device of `matrix.weight` are those of the weight on this rank;
        it has no memory. The caller puts a weight on the meta device in its place.

        Args:
            names: dotted paths, as the checkpoint has them, of the linears that `matrix` merges.
                Experts are a linear each, or one for all.

        Raises:
            UnsupportedModelError: only some of them are in this format, or not in the same form.
            ConfigError: this rank's part begins or ends inside a group of numbers.
        """
        ...
