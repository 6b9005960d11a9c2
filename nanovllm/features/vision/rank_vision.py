"""The pictures of one rank: runs the tower, keeps embeddings, and gives them to rows.

The scheduler decides what is encoded, in which steps, and what is dropped.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import partial
from itertools import islice

import torch

from nanovllm.attention.batch import Replaced
from nanovllm.attention.selector import select_backend
from nanovllm.core.messages import Row, Schedule
from nanovllm.core.worker_info import EncoderInfo, WorkerInfo
from nanovllm.features.vision.family import VisionFamily
from nanovllm.features.vision.messages import (
    NAME,
    EncoderStep,
    Picture,
    PictureSpan,
    Pixels,
    TowerSlice,
)
from nanovllm.features.vision.tower import VisionTower
from nanovllm.kernels.torch_kernels import Kernels
from nanovllm.loading.loader import init_dummy_weights, load_weights
from nanovllm.loading.tensor_files import read_header
from nanovllm.models.decoder import Family
from nanovllm.models.model_config import ModelConfig
from nanovllm.worker.hooks import RowNeeds, WorkerHook
from nanovllm.worker.model_loader import NetworkSpec, WeightForms, default_dtype, use_kernels
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.network import Companion


class RankVision(WorkerHook):
    """A part of a runner, which gives soft tokens their embeddings and angles.

    Attributes:
        tower: loaded.
    """

    def __init__(self, runner: ModelRunner, family: VisionFamily, spec: NetworkSpec) -> None:
        network = runner.network
        self._family = family
        self._token_weights = token_weights(spec.model_config)
        self._device = network.device
        self._dtype = spec.model_config.dtype
        self.tower = load_tower(family, spec, network.device, network.kernels)
        needed = self.tower.attention_spec(self._dtype, network.device)
        backends = network.platform.attention_backends(network.kernels)
        self.tower.attention = select_backend(needed, backends)
        network.companions.append(Companion(self.tower, partial(make_tower, family, spec)))
        self._features: dict[bytes, torch.Tensor] = {}  # by digest, [N, (1 + D) * hidden_size]
        self._running: dict[bytes, Iterator[torch.Tensor | None]] = {}  # of `_embeddings`
        self._spans: dict[int, tuple[PictureSpan, ...]] = {}  # by table row
        self._num_prompt_tokens: dict[int, int] = {}
        # Whether the soft tokens of a picture see each other.
        self._sees_whole = network.attention.picture_tokens > 0
        self._angles = None
        if family.axes:
            assert isinstance(network.model, Family)
            most = runner.max_num_batched_tokens
            self._angles = SpareAngles(network.model, family.axes, most)

    def open(self, info: WorkerInfo, run: Callable[[list[Row]], object]) -> WorkerInfo:
        """Say what encoding costs."""
        config = self.tower.config
        encoder = EncoderInfo(
            max(config.num_layers, 1),  # a tower without layers has its other parts
            config.hidden_size,
            config.layer_weights,
            self._token_weights,
            self.tower.output_size * self._dtype.itemsize,
            (*config.convolved, *config.windowed),
        )
        return dataclasses.replace(info, encoder=encoder)

    def begin(self, schedule: Schedule) -> None:
        """Note which sequences have pictures, and run the step's part of the tower."""
        for new in schedule.admissions:
            self._spans.pop(new.table_idx, None)
            if new.extras is not None and NAME in new.extras:
                self._spans[new.table_idx] = new.extras[NAME]
                self._num_prompt_tokens[new.table_idx] = new.num_prompt_tokens
        step: EncoderStep | None = (schedule.extras or {}).get(NAME)
        if step is None:
            return
        for digest in step.dropped:
            self._features.pop(digest, None)
            self._running.pop(digest, None)
        for part in step.slices:
            self._encode(part)

    def _encode(self, part: TowerSlice) -> None:
        if part.picture is not None:
            self._running[part.digest] = self._embeddings(part.picture)
        # A tower without layers has ended with the first part of a view.
        for found in islice(self._running.get(part.digest, ()), part.num_parts):
            if found is not None:
                self._features[part.digest] = found
                del self._running[part.digest]

    def _embeddings(self, picture: Picture) -> Iterator[torch.Tensor | None]:
        """Yield None after each part of the tower's layers, but after the last one the embeddings
        of all views.
        """
        patch = self._family.patch
        features: list[torch.Tensor] = []  # of the views that are done
        for view in picture.views:
            sides = view.height // patch, view.width // patch
            for found in self.tower.encode(
                patches_of(view, self._family).to(self._device, self._dtype),
                *sides,
                picture.num_parts,
            ):
                if found is not None:
                    features.append(found)
                if len(features) < len(picture.views):
                    yield None
        yield torch.cat(features)

    def begin_rows(self, rows: list[Row]) -> RowNeeds | None:
        if not any(row.table_idx in self._spans for row in rows):
            return None
        soft: list[int] = []  # tokens of the batch
        values: list[torch.Tensor] = []
        ends: list[int] = []  # of the spans of these tokens
        placed: list[int] = []
        places: list[torch.Tensor] = []  # [3, N] each
        index = 0
        for row in rows:
            spans = self._spans.get(row.table_idx, ())
            end = min(row.end, self._num_prompt_tokens.get(row.table_idx, 0)) if spans else 0
            start = row.num_computed_tokens
            if start < end:
                if self._angles is not None:
                    placed += range(index, index + end - start)
                    places.append(places_of(spans, start, end))
                for span in spans:
                    first, last = max(span.start, start), min(span.end, end)
                    if first < last:
                        at = span.offset - span.start
                        values.append(self._features[span.digest][at + first : at + last])
                        soft += range(index + first - start, index + last - start)
                        ends += [span.end] * (last - first)
            index += row.num_scheduled_tokens
        if not (soft or placed):
            return None
        needs = RowNeeds()
        if soft:
            tokens = self._tensor(soft)
            needs = needs._replace(embeds=Replaced(tokens, torch.cat(values)))
            if self._sees_whole:
                needs = needs._replace(ends=Replaced(tokens, self._tensor(ends).int()))
        if placed and self._angles is not None:
            turned = self._angles.rows(torch.cat(places, dim=1).to(self._device))
            needs = needs._replace(rope=Replaced(self._tensor(placed), turned))
        return needs

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, device=self._device)

    def give_back(self) -> None:
        """Forget all embeddings. The scheduler forgets them, too."""
        self._features.clear()
        self._running.clear()

    def free(self) -> None:
        self._spans.clear()


def patches_of(view: Pixels, family: VisionFamily) -> torch.Tensor:
    """Return what a family's tower reads of a view: patches [P, numbers] float32."""
    pixels = torch.frombuffer(bytearray(view.rgb), dtype=torch.uint8)
    normal = family.normalized(pixels, (view.width, view.height))
    return family.patches(normal)


def token_weights(config: ModelConfig) -> int:
    """Return about how many weights of the layers a token is multiplied with."""
    heads = 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    return config.num_layers * config.hidden_size * (heads + 3 * config.intermediate_size)


class SpareAngles:
    """Rows of a model's tables of angles for tokens whose pairs rotate by different positions.

    They lie behind those of the positions, and each step writes its own.

    Args:
        axes: of each pair of a head: 0 for time, 1 for the row, 2 for the column.
        most: tokens of a step.
    """

    def __init__(self, model: Family, axes: Seq[int], most: int) -> None:
        self._first = model.max_model_len
        self._tables = []
        for rotary in model.rotary.values():
            table = rotary.cos_sin
            rotary.cos_sin = torch.cat([table, table.new_zeros(most, table.shape[1])])
            self._tables.append(rotary)
        self._axes = torch.tensor(axes, device=self._tables[0].cos_sin.device)

    def rows(self, places: torch.Tensor) -> torch.Tensor:
        """Return the row of the tables of each token, [N] int64; write those that differ.

        Args:
            places: [3, N] int64, the time, row and column of each token.
        """
        mixed = ((places[0] != places[1]) | (places[0] != places[2])).nonzero().squeeze(1)
        spare = self._first + torch.arange(len(mixed), device=places.device)
        pairs = torch.arange(len(self._axes), device=places.device)
        wanted = places[:, mixed][self._axes].T  # [M, pairs]
        for rotary in self._tables:
            cos, sin = rotary.cos_sin.chunk(2, dim=1)
            rotary.cos_sin[spare] = torch.cat([cos[wanted, pairs], sin[wanted, pairs]], dim=1)
        return places[0].index_copy(0, mixed, spare)


def places_of(spans: Seq[PictureSpan], start: int, end: int) -> torch.Tensor:
    """Return the time, row and column of the tokens from position `start` to `end`: [3, N] int64.

    Text counts on from what is before it. A picture's tokens all have the time of its first one,
    and rows and columns count from there.
    """
    parts = []
    shift = 0
    position = 0
    for span in (*spans, PictureSpan(max(end, spans[-1].end), 0, b"", 0)):
        parts.append(torch.arange(position + shift, span.start + shift).expand(3, -1))
        columns = max(span.grid[1], 1)
        cells = torch.arange(span.offset, span.offset + span.length)
        time = torch.zeros_like(cells)
        parts.append(span.place + torch.stack([time, cells // columns, cells % columns]))
        shift = span.next_place - span.end
        position = span.end
    return torch.cat(parts, dim=1)[:, start:end]


def make_tower(family: VisionFamily, spec: NetworkSpec) -> VisionTower:
    """Return a family's tower in the dtype of the model, with weights that are not loaded."""
    with default_dtype(spec.model_config.dtype):
        return family.make_tower()


def load_tower(
    family: VisionFamily, spec: NetworkSpec, device: torch.device, kernels: Kernels
) -> VisionTower:
    """Return a family's tower with the weights of a checkpoint.

    Raises:
        CheckpointError: a tensor is missing, or of another shape.
    """
    with device:
        tower = make_tower(family, spec)
    use_kernels(tower, kernels)
    forms = WeightForms(tower, spec.model_config.dtype, kernels)
    load = partial(load_weights, tower, progress=False, on_loaded=forms.finish, store=forms.store)
    if spec.config.load_format == "dummy":
        init_dummy_weights(tower, spec.config.seed)
        for module in tower.modules():
            forms.finish(module)
    elif family.mmproj is not None:
        load([family.mmproj])
    else:
        known = {name for file in spec.files for name in read_header(file)}
        ours = tuple(place + part for place in tower.places for part in tower.parts)
        load(spec.files, ignored=frozenset(name for name in known if not name.startswith(ours)))
    return tower.eval().requires_grad_(False)
