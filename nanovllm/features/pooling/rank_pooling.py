"""Pools hidden states on one rank: of the rows of a step whose sequences ask for it.

A step may have such rows beside those that generate.
"""

import itertools
from collections.abc import Callable, Sequence as Seq
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nanovllm.core.messages import Admission, Row
from nanovllm.errors import CheckpointError
from nanovllm.features.pooling.checkpoint_files import PoolingSettings, read_settings
from nanovllm.features.pooling.module_files import DenseFile, File, LayerNormFile
from nanovllm.loading.files import check_file
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.worker.network import Network
from nanovllm.worker.step_output import Pooled

Layer = Callable[[torch.Tensor], torch.Tensor]
_TINY = 1e-12
"""The least length to divide by, as in sentence-transformers."""


class PooledRow(NamedTuple):
    """A row whose sequence is pooled."""

    row: Row
    start: int
    """The index in the batch of its first token."""
    params: PoolingParams
    num_tokens: int
    """Of the whole prompt."""
    is_recordable: bool
    """Whether its tokens have the positions that a recorded step counts."""

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.row.end == self.num_tokens


class RankPooling:
    """What becomes of the hidden states of sequences that generate nothing.

    Args:
        files: the network's weights, beside which the checkpoint's other files are.
    """

    def __init__(self, network: Network, files: Seq[Path]) -> None:
        self._network = network
        self._no_position: int | None = network.model.no_position  # type: ignore[assignment]
        settings = PoolingSettings()
        if files:
            settings = read_settings(Checkpoint(files[0].parent, {}, {}), "")
        self._head = VectorHead(settings, network.device)
        self._admitted: dict[int, Admission] = {}  # those to pool, by table row
        self._states: dict[int, torch.Tensor] = {}  # by table row, of prompts computed in part

    def admit(self, admissions: list[Admission]) -> None:
        """Note which table rows are pooled from now on."""
        for new in admissions:
            self._states.pop(new.table_idx, None)
            if new.pooling is None:
                self._admitted.pop(new.table_idx, None)
            else:
                self._admitted[new.table_idx] = new

    def begin(self, rows: list[Row]) -> "PooledRows | None":
        """Return the part of a step of `rows` that is pooled; None if no row is."""
        found = []
        start = 0
        for row in rows:
            new = self._admitted.get(row.table_idx)
            if new is not None and new.pooling is not None and new.seq_id == row.seq_id:
                odd = self._no_position is not None and self._no_position in new.token_ids
                found.append(PooledRow(row, start, new.pooling, new.num_prompt_tokens, not odd))
            start += row.num_scheduled_tokens
        return PooledRows(self._network, self._head, found, start, self._states) if found else None


class PooledRows:
    """The rows of a step that are pooled.

    Args:
        num_tokens: T, of all rows of the step.
        states: by table row, what earlier steps left. Changed by `take`.
    """

    def __init__(
        self,
        network: Network,
        head: "VectorHead",
        rows: Seq[PooledRow],
        num_tokens: int,
        states: dict[int, torch.Tensor],
    ) -> None:
        self._network = network
        self._head = head
        self._rows = rows
        self._num_tokens = num_tokens
        self._states = states
        last = [each.start + each.row.num_scheduled_tokens - 1 for each in rows if each.is_last]
        self._last = network.platform.upload(last)
        self.is_recordable = all(each.is_recordable for each in rows)

    def join(self, sampled: torch.Tensor) -> torch.Tensor | None:
        """Return the tokens of the batch whose hidden states a step needs, in ascending order.

        Args:
            sampled: [S] int64, those of rows that sample.

        Returns:
            [O] int64; None: all T.
        """
        if any(each.params.reads_all for each in self._rows):
            return None
        return torch.cat([sampled, self._last]).sort().values

    def take(
        self, hidden: torch.Tensor, sampled: torch.Tensor
    ) -> tuple[list[Pooled], torch.Tensor]:
        """Pool the hidden states of a step.

        Args:
            hidden: [T, hidden_size], or [O, hidden_size] of the tokens of `join`.
            sampled: the argument of `join`.

        Returns:
            What the rows became that end their prompts; and the hidden states of `sampled`, or of
            all T.
        """
        last = self._last
        others = hidden
        if len(hidden) != self._num_tokens:
            joined = self.join(sampled)
            assert joined is not None
            last = torch.searchsorted(joined, last)
            others = hidden[torch.searchsorted(joined, sampled)]
        of_last = hidden[last]
        vectors: dict[PoolingParams, list[tuple[int, torch.Tensor]]] = {}
        places = itertools.count()
        for each in self._rows:
            state = self._accumulated(each, hidden) if each.params.reads_all else None
            if each.is_last:
                own = of_last[next(places)]
                found = own if state is None else state
                vectors.setdefault(each.params, []).append((each.row.seq_id, found))
        pooled = [self._finished(params, found) for params, found in vectors.items()]
        return [each for each in pooled if each is not None], others

    def _accumulated(self, each: PooledRow, hidden: torch.Tensor) -> torch.Tensor:
        """Return the vector of the prompt so far, [hidden_size], and keep it for the next step.

        The mean adds one token after the other in float64: it is the same in chunks of any size.
        """
        row = each.row
        table_idx = row.table_idx
        if each.params.pooling == "cls":
            if row.num_computed_tokens == 0:
                self._states[table_idx] = hidden[each.start].clone()
            return self._states[table_idx]
        states = hidden[each.start : each.start + row.num_scheduled_tokens].double()
        if row.num_computed_tokens:
            states[0] += self._states[table_idx]
        total = self._states[table_idx] = states.cumsum(0)[-1].clone()
        return total / row.end

    def _finished(
        self, params: PoolingParams, found: list[tuple[int, torch.Tensor]]
    ) -> Pooled | None:
        """Return what is sent of the vectors of rows with equal `params`; None except on rank 0."""
        seq_ids = [seq_id for seq_id, _ in found]
        vectors = torch.stack([vector for _, vector in found])
        if params.token_ids:
            model = self._network.model
            logits: torch.Tensor | None = model.compute_logits(vectors)  # type: ignore[operator]
            if logits is None:
                return None
            return Pooled(seq_ids, logits[:, list(params.token_ids)].float())
        return Pooled(seq_ids, self._head.finished(vectors, params))


class VectorHead:
    """What a checkpoint does with pooled vectors, by the files of sentence-transformers.

    Raises:
        CheckpointError: a layer has no weights, or others than its file says.
    """

    def __init__(self, settings: PoolingSettings, device: torch.device) -> None:
        self._dimensions = settings.dimensions
        self._layers = [_layer(*each, device) for each in settings.layers]

    @torch.inference_mode()
    def finished(self, vectors: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the vectors of a request, float32, from those of pooling, [N, hidden_size].

        Layers see one vector at a time, so its bits do not depend on the others.
        """
        for layer in self._layers:
            vectors = torch.stack([layer(vector.float()) for vector in vectors])
        vectors = vectors[:, : params.dimensions].double()
        if params.normalize:
            vectors = vectors / vectors.square().sum(-1, keepdim=True).sqrt().clamp(min=_TINY)
        if params.dimensions is None:
            vectors = vectors[:, : self._dimensions]
        return vectors.float()


def check_layers(settings: PoolingSettings, size: int) -> None:
    """Raise CheckpointError if the layers after pooling do not take vectors of `size` numbers."""
    head = VectorHead(settings, torch.device("cpu"))
    try:
        head.finished(torch.zeros(1, size), PoolingParams())
    except RuntimeError as error:
        raise CheckpointError(f"the layers after pooling do not fit: {error}") from error


def _layer(folder: Path, file: File, device: torch.device) -> Layer:
    """Return what a layer does with a vector [k] float32."""
    activation: nn.Module = nn.Identity()
    match file:
        case DenseFile():
            activation = getattr(nn, file.activation_function.rpartition(".")[2])()
            layer: nn.Module = nn.Linear(file.in_features, file.out_features, file.bias)
        case LayerNormFile():
            layer = nn.LayerNorm(file.dimension)
        case _:
            return partial(nn.functional.normalize, dim=-1)
    try:
        if not check_file(folder, "model.safetensors"):
            raise OSError("there is no model.safetensors: save it with safe_serialization")
        tensors = load_file(folder / "model.safetensors")
        layer.load_state_dict({name.partition(".")[2]: tensors[name] for name in tensors})
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"the layer in {folder} cannot be used: {reason}") from error
    return nn.Sequential(layer, activation).to(device)
