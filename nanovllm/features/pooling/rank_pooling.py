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

from nanovllm.core.messages import Admission, Row, Schedule
from nanovllm.errors import CheckpointError
from nanovllm.features.pooling.checkpoint_files import (
    DenseFile,
    File,
    LayerNormFile,
    PoolingSettings,
    read_settings,
)
from nanovllm.loading.files import check_file
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.pooling_params import PoolingParams
from nanovllm.worker.hooks import RowNeeds, WorkerHook
from nanovllm.worker.network import Network
from nanovllm.worker.step_output import NO_DISTRIBUTION, PendingResult

Layer = Callable[[torch.Tensor], torch.Tensor]
_TINY = 1e-12
"""The least length to divide by, as in sentence-transformers."""


NO_VECTOR = NO_DISTRIBUTION._replace(
    stop_reason="the hidden states have NaN or inf; check the model's weights and dtype"
)
"""Of a row whose vector is not finite."""


class PooledRow(NamedTuple):
    """A row whose sequence is pooled."""

    row: Row
    start: int
    """The index in the batch of its first token."""
    params: PoolingParams
    num_tokens: int
    """Of the whole prompt."""

    @property
    def is_last(self) -> bool:
        """Whether it ends the prompt."""
        return self.row.end == self.num_tokens


def add_pooled(seq_ids: list[int], values: torch.Tensor, pending: PendingResult) -> None:
    """Add what the hidden states of P sequences became to the result of their step.

    Args:
        values: [P, D] float32, on the host.
    """
    rows = seq_ids, values.tolist(), values.isfinite().all(-1).tolist()
    for seq_id, vector, is_finite in zip(*rows, strict=True):
        if is_finite:
            pending.add_extra(seq_id, "pooled", vector)
        else:
            pending.finish_infos[seq_id] = NO_VECTOR


class RankPooling(WorkerHook):
    """What becomes of the hidden states of sequences whose extras have PoolingParams as "pooling".

    Args:
        files: the network's weights, beside which the checkpoint's other files are.
    """

    def __init__(self, network: Network, files: Seq[Path]) -> None:
        self._model = network.model
        self._to_host = network.platform.to_host
        # The id without a position of its own, which a recorded step would count.
        self._no_position: int | None = network.model.no_position  # type: ignore[assignment]
        settings = PoolingSettings()
        if files:
            settings = read_settings(Checkpoint(files[0].parent, {}, {}), "")
        self._head = VectorHead(settings, network.device)
        self._admitted: dict[int, Admission] = {}  # those to pool, by table row
        self._states: dict[int, torch.Tensor] = {}  # by table row, of prompts computed in part
        self._pooled: list[Callable[[PendingResult], None]] = []  # of the running step

    def begin(self, schedule: Schedule) -> None:
        """Note which table rows are pooled from now on."""
        self._pooled = []
        for new in schedule.admissions:
            self._states.pop(new.table_idx, None)
            if new.extras is None or "pooling" not in new.extras:
                self._admitted.pop(new.table_idx, None)
            else:
                self._admitted[new.table_idx] = new

    def begin_rows(self, rows: list[Row]) -> RowNeeds | None:
        """Ask for the last hidden state of each prompt, or for all of them."""
        found: list[PooledRow] = []
        last: list[int] = []
        start = 0
        by_layer = False
        for row in rows:
            new = self._admitted.get(row.table_idx)
            if new is not None and new.extras is not None and new.seq_id == row.seq_id:
                found.append(PooledRow(row, start, new.extras["pooling"], new.num_prompt_tokens))
                by_layer = by_layer or self._no_position in new.token_ids
                if found[-1].is_last:
                    last.append(start + row.num_scheduled_tokens - 1)
            start += row.num_scheduled_tokens
        if not found:
            return None
        reads_all = any(each.params.reads_all for each in found)
        read = partial(self._read, found)
        return RowNeeds(None if reads_all else last, read, by_layer)

    def end(self, schedule: Schedule, pending: PendingResult) -> None:
        """Add what the rows became that end their prompts."""
        pending.on_host += self._pooled

    def _read(self, rows: Seq[PooledRow], hidden: torch.Tensor) -> None:
        """Pool the hidden states of a step: those that `begin_rows` asked for."""
        has_all = any(each.params.reads_all for each in rows)
        places = itertools.count()
        vectors: dict[PoolingParams, list[tuple[int, torch.Tensor]]] = {}
        for each in rows:
            state = self._accumulated(each, hidden) if each.params.reads_all else None
            if each.is_last:
                end = each.start + each.row.num_scheduled_tokens
                own = hidden[end - 1 if has_all else next(places)]
                found = own if state is None else state
                vectors.setdefault(each.params, []).append((each.row.seq_id, found))
        pooled = (self._finished(params, found) for params, found in vectors.items())
        self._pooled = [*filter(None, pooled)]

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
    ) -> Callable[[PendingResult], None] | None:
        """Return what adds the vectors of rows with equal `params` to the result, once they are on
        the host; None except on rank 0.
        """
        seq_ids = [seq_id for seq_id, _ in found]
        vectors = torch.stack([vector for _, vector in found])
        if params.token_ids:
            logits: torch.Tensor | None = self._model.compute_logits(vectors)  # type: ignore[operator]
            if logits is None:
                return None
            values = logits[:, list(params.token_ids)].float()
        else:
            values = self._head.finished(vectors, params)
        return partial(add_pooled, seq_ids, self._to_host(values))


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
