"""What a model family declares of pictures: the sizes it reads, their text, and its tower."""

import dataclasses
import importlib.util
import logging
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from nanovllm.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from nanovllm.loading.hub import Checkpoint
from nanovllm.options.config import Config
from nanovllm.options.validation import check_float, check_int

if TYPE_CHECKING:
    import torch

    from nanovllm.features.vision.tower import VisionTower

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""The mean and standard deviation of colours that CLIP was trained with, and many since."""

_OF_VIDEOS = ("fps", "num_frames", "do_sample_frames")
FAMILIES = {
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4:Gemma4Unified",
    "Lfm2VlForConditionalGeneration": "lfm2_vl:Lfm2VL",
    "Lfm3VlForConditionalGeneration": "lfm3_vl:Lfm3VL",
    "Mistral3ForConditionalGeneration": "pixtral:Pixtral",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl:Qwen2_5VL",
    "Qwen3VLForConditionalGeneration": "qwen:QwenVL",
    "Qwen3VLMoeForConditionalGeneration": "qwen:QwenVL",
    "Qwen3_5ForConditionalGeneration": "qwen:QwenVL",
    "Qwen3_5MoeForConditionalGeneration": "qwen:QwenVL",
}
"""The file of each architecture that reads pictures, and the class in it."""


class View(NamedTuple):
    """What the tower reads at once: a picture, resized, or a tile of it."""

    width: int  # of the whole picture after resizing, in pixels
    height: int
    box: tuple[int, int, int, int] | None = None  # left, upper, right, lower; None: all of it

    @property
    def size(self) -> tuple[int, int]:
        """The width and height of what the tower reads."""
        if self.box is None:
            return self.width, self.height
        return self.box[2] - self.box[0], self.box[3] - self.box[1]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a picture becomes in a prompt."""

    views: tuple[View, ...]
    pieces: tuple[str | int, ...]  # text, and numbers of soft tokens
    # Rows and columns of soft tokens, if they have places of their own in the text; else (0, 0).
    grid: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        """The number of soft tokens, each of which stands for an embedding."""
        return sum(piece for piece in self.pieces if isinstance(piece, int))

    @property
    def from_soft_to_soft(self) -> tuple[str | int, ...]:
        """The pieces from the first to the last of soft tokens."""
        soft = [i for i, piece in enumerate(self.pieces) if isinstance(piece, int)]
        return self.pieces[soft[0] : soft[-1] + 1]


class VisionFamily(ABC):
    """How the models of a family read pictures.

    Args:
        config: config.json.
        processor: preprocessor_config.json, or the same part of processor_config.json; {} if the
            checkpoint has neither.
    """

    resample = "bicubic"  # or "bilinear", "lanczos"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    axes: tuple[int, ...] = ()
    """By what each pair of a head of the text model rotates: 0 for a token's time, 1 for its row, 2
    for its column; (): all by its position."""
    patch: int
    """Pixels of a side of a patch."""
    merge = 1
    """Patches lie in blocks of merge x merge."""
    channels_last = False
    """Whether the colours of a pixel are neighbours in a patch."""
    reads_colours = True
    """Whether the processor says `mean` and `std`."""
    spare_token: str | None = None
    """What stands for a part of a picture where a GGUF file lacks `soft_token`; no text has it."""
    mmproj: Path | None = None
    """The GGUF file that has the tower; None: the checkpoint has it."""

    def __init__(self, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.config = config
        self.processor = processor
        if self.reads_colours:
            self.mean = tuple(processor.get("image_mean") or self.mean)
            self.std = tuple(processor.get("image_std") or self.std)

    @property
    @abstractmethod
    def marker(self) -> str:
        """What templates write for a picture."""

    @property
    def placeholder(self) -> str:
        """What templates write for a picture, with all that is around the marker."""
        return self.marker

    @property
    @abstractmethod
    def soft_token(self) -> str:
        """The token that stands for a part of a picture."""

    @property
    def soft_token_id(self) -> int:
        """The id of `soft_token`."""
        value = self.config.get("image_token_id", self.config.get("image_token_index"))
        return check_int(CheckpointError, "config.json: image_token_id", value, 0)

    @abstractmethod
    def layout(self, width: int, height: int, options: Mapping[str, Any]) -> Layout:
        """Return what a picture of `width` x `height` pixels becomes.

        Args:
            options: `mm_processor_kwargs` of the request or of the engine.

        Raises:
            InvalidRequestError: the family reads no such picture, or an option is unknown.
        """

    def tokens_that_see_each_other(self, options: Mapping[str, Any], *, has_window: bool) -> int:
        """Return how many soft tokens of a picture see each other, at most, in the text model's
        layers with a window, or in those without; 0: each sees only those before it.

        Args:
            options: `mm_processor_kwargs` of the engine.
        """
        return 0

    @abstractmethod
    def make_tower(self) -> "VisionTower":
        """Return the network, with weights that are not loaded."""

    def patches(self, pixels: "torch.Tensor") -> "torch.Tensor":
        """Return the patches [P, numbers] of a view's normalised pixels [height, width, 3]."""
        blocks = self.blocks(pixels)
        return (blocks.permute(0, 2, 3, 1) if self.channels_last else blocks).flatten(1)

    def blocks(self, pixels: "torch.Tensor") -> "torch.Tensor":
        """Return the patches of pixels [height, width, 3] in blocks of merge x merge, which lie one
        after the other: [P, 3, patch, patch].
        """
        size, merge = self.patch, self.merge
        rows, columns = (side // (size * merge) for side in pixels.shape[:2])
        blocks = pixels.view(rows, merge, size, columns, merge, size, 3)
        return blocks.permute(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, size, size)

    def normalized(self, rgb: "torch.Tensor", size: tuple[int, int]) -> "torch.Tensor":
        """Return the numbers [height, width, 3] float32 of a view's bytes [height * width * 3].

        They are computed in float64 and rounded once, as by transformers' processors on Pillow.
        """
        import torch

        mean, std = (torch.tensor(each, dtype=torch.float64) for each in (self.mean, self.std))
        width, height = size
        return ((rgb.view(height, width, 3).double() / 255 - mean) / std).float()

    @cached_property
    def vision_config(self) -> Mapping[str, Any]:
        found = self.config.get("vision_config")
        if not isinstance(found, Mapping):
            raise CheckpointError("config.json has no vision_config, the fields of the tower")
        return found

    def size(self, name: str, default: int | None = None, high: int = 2**20) -> int:
        """Return a positive integer of vision_config."""
        value = self.vision_config.get(name, default)
        return check_int(CheckpointError, f"config.json: vision_config.{name}", value, 1, high)

    def sizes(
        self,
        layers: int | None = None,
        hidden: int | None = None,
        inner: int | None = None,
        heads: int | None = None,
        names: tuple[str, str] = ("num_hidden_layers", "num_attention_heads"),
    ) -> dict[str, Any]:
        """Return the sizes of a `TowerConfig`, with the family's defaults; None: there is none.

        Args:
            names: of the fields that say how many layers and heads there are.
        """
        return {
            "num_layers": self.size(names[0], layers, high=256),
            "hidden_size": self.size("hidden_size", hidden),
            "intermediate_size": self.size("intermediate_size", inner),
            "num_heads": self.size(names[1], heads, high=1024),
            "merge": self.merge,
        }

    def field(self, name: str, default: T, check: Callable[..., T], *limits: int) -> T:
        """Return a field of config.json that is no part's, by a check of options/validation.py."""
        value = self.config.get(name, default)
        return check(CheckpointError, f"config.json: {name}", value, *limits)

    @cached_property
    def text_size(self) -> int:
        """The hidden size of the text model."""
        text = self.config.get("text_config") or self.config
        where = "config.json: text_config.hidden_size"
        return check_int(CheckpointError, where, text.get("hidden_size"), 1)

    def rope_theta(self, default: float) -> float:
        """Return the base of the tower's angles."""
        rope = self.vision_config.get("rope_parameters") or self.vision_config
        where = "config.json: vision_config.rope_theta"
        return check_float(CheckpointError, where, rope.get("rope_theta", default), 1.0)


def find_family(config: Config, checkpoint: Checkpoint) -> VisionFamily | None:
    """Return how a checkpoint reads pictures; None: it reads none, or is not to read any.

    Raises:
        CheckpointError: a field of its files has an invalid value.
    """
    fields = checkpoint.config
    if checkpoint.mmproj is not None:
        try:
            fields = _with_mmproj(checkpoint, checkpoint.mmproj)
        except UnsupportedModelError as error:
            if config.mmproj is not None:
                raise
            logger.warning("this model runs without pictures: %s", error)
    place = FAMILIES.get((fields.get("architectures") or [""])[0])
    is_off = (config.limit_mm_per_prompt or {}).get("image") == 0
    if place is None or is_off or not fields.get("vision_config"):
        return None
    if importlib.util.find_spec("PIL") is None:
        logger.warning("this model also reads pictures, which needs Pillow: pip install pillow")
        return None
    family: type[VisionFamily] = pkgutil.resolve_name(f"nanovllm.features.vision.{place}")
    if checkpoint.mmproj is None:
        return family(fields, checkpoint.processor)
    return _of_mmproj(family, fields, checkpoint)


def _of_mmproj(
    family: type[VisionFamily], fields: dict[str, Any], checkpoint: Checkpoint
) -> VisionFamily:
    """Return the family of a GGUF file, by what `_with_mmproj` returned."""
    from nanovllm.loading.gguf import read_gguf

    processor = dict(fields["image_processor"])
    for name, own in (("image_mean", family.mean), ("image_std", family.std)):
        if all(abs(a - b) < 1e-7 for a, b in zip(processor[name], own, strict=True)):
            del processor[name]  # it is the same, and the file has it in 32 bits
    try:
        found = family(fields, processor)
    except CheckpointError as error:  # the message names fields of a config.json
        raise type(error)(f"{checkpoint.mmproj}, its metadata as a {error}") from error
    found.mmproj = checkpoint.mmproj
    tokens: list[str] = read_gguf(checkpoint.path).tokenizer.get("tokens") or []
    for token in (found.soft_token, found.spare_token):
        if token in tokens:
            fields |= {"image_token": token, "image_token_id": tokens.index(token)}
            return found
    raise CheckpointError(
        f"{checkpoint.path}: tokenizer.ggml.tokens has no {found.soft_token}, which stands for a "
        'part of a picture; start with limit_mm_per_prompt={"image": 0}'
    )


def _with_mmproj(checkpoint: Checkpoint, file: Path) -> dict[str, Any]:
    """Return the config.json of the model that a text model and an mmproj file make.

    Raises:
        CheckpointError: they do not fit each other, or it is another file.
    """
    from nanovllm.loading.gguf import read_gguf
    from nanovllm.loading.mmproj import PROJECTORS, WAY_OUT

    text = checkpoint.config
    found = read_gguf(file).config
    projector = PROJECTORS.get(found["model_type"])
    if projector is None:
        raise CheckpointError(
            f"{file} is a text model ({found['model_type']}), and no mmproj file, whose "
            f"general.architecture is clip: {WAY_OUT}"
        )
    kind = text["model_type"]
    size = text["hidden_size"]
    width = found["vision_config"]["out_hidden_size"]
    deep = len(found["vision_config"]["deepstack_visual_indexes"])
    wrong = ""
    if kind not in projector.texts:
        known = " or ".join(projector.texts)
        wrong = f"clip.projector_type {found['model_type']} is for {known}, and this is {kind}"
    elif width != size:
        wrong = f"clip.vision.projection_dim {width} must be the model's embedding_length, {size}"
    elif text.get("n_deepstack_layers", deep) != deep:
        wrong = f"it has {deep} deepstack layers, the model says {text['n_deepstack_layers']}"
    if wrong:
        raise CheckpointError(f"{file} is not for {checkpoint.path}: {wrong}; {WAY_OUT}")
    # Where no layer has an embedding of its own for each token, pictures see both ways.
    both_ways = "vision" if text.get("hidden_size_per_layer_input") == 0 else None
    text = {**text, "use_bidirectional_attention": both_ways}
    return {**found, "text_config": text}


def refuse_options(options: Mapping[str, Any], *known: str) -> None:
    """Raise InvalidRequestError if `options` has another name than those known, or of videos."""
    for name in options:
        if name not in (*known, *_OF_VIDEOS):
            raise InvalidRequestError(
                f"mm_processor_kwargs has {name!r}, which this model does not know; it knows "
                f"{', '.join(known) or 'none'}"
            )
