"""Reads an adapter that PEFT has saved: adapter_config.json and adapter_model.safetensors.

Nothing in the files is trusted: what is read is checked, bounded, and hashed as it was read.
What is not implemented is refused by name.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from nanovllm.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from nanovllm.features.lora.layer_parts import Slice
from nanovllm.loading.files import (
    MAX_JSON_BYTES,
    check_file,
    local_path,
    parse_object,
    refuse_pointer,
)
from nanovllm.options.validation import (
    check_bool,
    check_float,
    check_int,
    listed,
    shown,
    unsupported,
)
from nanovllm.utils.safe_regex import SafeRegex

T = TypeVar("T")
Patterns = list[tuple[str | SafeRegex, T]]
"""Ends of paths, or expressions that match a whole path, each with the value of such linears."""

MAX_RANK = 512
"""Of any adapter."""
_MAX_PATTERNS = 4096
"""Entries of rank_pattern or alpha_pattern."""
_MAX_EXPRESSIONS = 16
"""How many of them may be regular expressions, which take longer to match than names."""
_NAME = re.compile(r"[\w.\-]+")
_PLAIN_INITS = ("gaussian", "orthogonal", "eva")
"""Initialisations that leave the base's weights as they are. Others change the base, too."""
_WITHOUT_MEANING = frozenset(
    {
        *("peft_type", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("auto_mapping", "peft_version", "lora_dropout", "runtime_config", "megatron_core"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
        *("bias", "ensure_weight_tying", "fan_in_fan_out"),
    }
)
"""Fields that are read here, or that say nothing about how a trained adapter computes: its tensors
say which linears it changes. fan_in_fan_out is about the weights of the base."""


class PeftConfig(NamedTuple):
    """What adapter_config.json says of ranks and scales."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    targets: tuple[str, ...] | None
    """Ends of the names of the linears; None: an expression, or all of them."""

    def rank_of(self, module: str) -> int:
        """Return the rank of linear `module`, a dotted path of the base model."""
        return _matching(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor on B A of linear `module`: alpha / r, or alpha / sqrt(r) of rslora
        (arXiv 2312.03732).
        """
        rank = self.rank_of(module)
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def aims_at(self, module: str) -> bool:
        """Return whether target_modules, if it is a list, has linear `module`."""
        return self.targets is None or any(
            module == target or module.endswith(f".{target}") for target in self.targets
        )


def read_peft_config(fields: dict[str, Any], source: str) -> PeftConfig:
    """Return what the parsed adapter_config.json says.

    Args:
        source: the file, for errors.

    Raises:
        UnsupportedModelError: it needs something that is not implemented.
        CheckpointError: a field is missing or has an invalid value.
    """
    if fields.get("peft_type") != "LORA":
        raise unsupported(f"{source}: peft_type", fields.get("peft_type"), "LORA")
    for name, value in fields.items():
        if name not in _WITHOUT_MEANING and value not in (None, False, [], {}, ""):
            raise UnsupportedModelError(
                f"{source}: {shown(name)} {shown(value)} is not supported; merge the adapter into "
                "the model with peft's merge_and_unload"
            )
    if fields.get("bias", "none") != "none":
        raise unsupported(f"{source}: bias", fields["bias"], "none")
    init = fields.get("init_lora_weights", True)
    if not isinstance(init, bool) and init not in _PLAIN_INITS:
        raise UnsupportedModelError(
            f"{source}: init_lora_weights {shown(init)} may have changed the base's weights, too: "
            "save the adapter with peft's path_initial_model_for_weight_conversion"
        )
    return PeftConfig(
        _rank(f"{source}: r", fields.get("r", 8)),
        _alpha(f"{source}: lora_alpha", fields.get("lora_alpha", 8)),
        check_bool(CheckpointError, f"{source}: use_rslora", fields.get("use_rslora", False)),
        _pattern(fields.get("rank_pattern"), "rank_pattern", _rank, source),
        _pattern(fields.get("alpha_pattern"), "alpha_pattern", _alpha, source),
        _targets(fields.get("target_modules"), source),
    )


def _targets(value: Any, source: str) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{source}: target_modules must be a string or a list of strings, is {shown(value)}"
        )
    return tuple(value)


def _rank(name: str, value: Any) -> int:
    return check_int(CheckpointError, name, value, 1, MAX_RANK)


def _alpha(name: str, value: Any) -> float:
    return check_float(CheckpointError, name, value, -1e6, 1e6)


def _pattern(value: Any, name: str, check: Callable[[str, Any], T], source: str) -> Patterns[T]:
    """Return a checked rank_pattern or alpha_pattern."""
    if value is None:
        return []
    if not isinstance(value, dict) or len(value) > _MAX_PATTERNS:
        raise CheckpointError(
            f"{source}: {name} must be an object of at most {_MAX_PATTERNS} entries, is "
            f"{shown(value)}"
        )
    num_expressions = sum(not _NAME.fullmatch(key) for key in value)
    if num_expressions > _MAX_EXPRESSIONS:
        raise UnsupportedModelError(
            f"{source}: {name} has {num_expressions} regular expressions; at most "
            f"{_MAX_EXPRESSIONS} are supported, so name the linears"
        )
    return [
        (_end(key, name, source), check(f"{source}: {name} of {shown(key)}", number))
        for key, number in value.items()
    ]


def _end(pattern: str, name: str, source: str) -> str | SafeRegex:
    """Return what a path has to end with to match `pattern`, as PEFT reads it."""
    if _NAME.fullmatch(pattern):
        return pattern
    try:
        return SafeRegex(rf"(.*\.)?({pattern})$")
    except ValueError as error:
        raise UnsupportedModelError(
            f"{source}: {name} {shown(pattern)} is a regular expression that is not supported "
            f"({error}): name the linears"
        ) from error


def _matching(patterns: Patterns[T], module: str, default: T) -> T:
    """Return the value of the first pattern that matches the end of path `module`."""
    for end, value in patterns:
        if isinstance(end, SafeRegex):
            if end.match(module):
                return value
        elif module == end or module.endswith(f".{end}"):
            return value
    return default


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_BYTES = 8 * 2**30
"""Of an adapter's weights."""
_MAX_TENSORS = 65_536
_MAX_PATH = 256
"""Characters of a linear's dotted path."""
_MAX_LISTED = 5
"""Mismatches that one error lists."""
_KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?P<part>[AB])\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Factors(NamedTuple):
    """What an adapter adds to a linear: scale * B A."""

    a: torch.Tensor
    """[r, inputs], in the file's dtype."""
    b: torch.Tensor
    """[outputs, r]."""
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


class Adapter(NamedTuple):
    """An adapter as its files have it."""

    path: str
    digest: str
    """SHA-256 of both files, as they were read, in hexadecimal digits."""
    linears: dict[str, Factors]
    """By the dotted path of the linear, without "base_model.model."."""

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(factors.rank for factors in self.linears.values())


def read_adapter(path: str, max_rank: int) -> Adapter:
    """Return the adapter in directory `path`.

    Raises:
        UnsupportedModelError: it needs something that is not implemented; the message names it.
        CheckpointError: a file is missing, is not sound or lies outside the directory, or a tensor
            has a wrong name, shape, dtype, or a number that is not finite.
        InvalidRequestError: a rank is above `max_rank`.
    """
    config_bytes, weight_bytes = _read_files(local_path(path, "adapter"))
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little"))
    digest.update(config_bytes)
    digest.update(weight_bytes)
    source = f"{path}/{CONFIG}"
    config = read_peft_config(parse_object(config_bytes, source), source)
    tensors = _tensors(weight_bytes, f"{path}/{WEIGHTS}")
    linears = _linears(tensors, config, f"{path}/{WEIGHTS}")
    adapter = Adapter(path, digest.hexdigest(), linears)
    if adapter.rank > max_rank:
        raise InvalidRequestError(
            f"adapter {path} has rank {adapter.rank}, max_lora_rank is {max_rank}: start the "
            f"engine with max_lora_rank={adapter.rank}"
        )
    return adapter


def fitting(adapter: Adapter, linears: Mapping[str, Slice]) -> dict[str, Factors]:
    """Return the factors of `adapter` by `Slice.name`: each linear is one of the model's, and has
    its shape.

    Raises:
        CheckpointError: one is not; the message lists the first few.
    """
    wrong = []
    found: dict[str, Factors] = {}
    for module, factors in adapter.linears.items():
        part = linears.get(module)
        outputs = len(factors.b)
        inputs = factors.a.shape[1]
        if part is None:
            wrong.append(f"{module} {_why_not(module)}")
        elif (outputs, inputs) != part.shape:
            wrong.append(
                f"{module} is for {inputs} inputs and {outputs} outputs, the model's has "
                f"{part.shape[1]} and {part.shape[0]}"
            )
        elif part.name in found:
            wrong.append(f"{module} is there twice, also under another name")
        else:
            found[part.name] = factors
    if wrong:
        lines = listed(wrong, _MAX_LISTED, "\n  ")
        raise CheckpointError(
            f"adapter {adapter.path} does not fit the model:\n  {lines}\n"
            "use an adapter of this model"
        )
    return found


def _why_not(module: str) -> str:
    if ".experts." in module or ".router." in module or module.endswith((".router", ".mlp.gate")):
        return "is of experts, which are not adapted: merge the adapter into the model"
    if module.endswith(("lm_head", "embed_tokens")):
        return "is the embedding or the head, which are not adapted: merge it into the model"
    if module.endswith(".kv_b_proj"):
        return "is of latent attention, which is not adapted: merge the adapter into the model"
    return "is no linear of the model"


def _read_files(directory: Path) -> tuple[bytes, bytes]:
    """Return the bytes of both files."""
    if not check_file(directory, CONFIG, MAX_JSON_BYTES):
        raise CheckpointError(f"{directory} has no {CONFIG}: name the directory of a PEFT adapter")
    if not check_file(directory, WEIGHTS, MAX_BYTES):
        if (directory / "adapter_model.bin").exists():
            raise UnsupportedModelError(
                f"{directory}: adapter_model.bin is a pickle, which can run code, and is not read: "
                "save the adapter again with peft's safe_serialization=True"
            )
        raise CheckpointError(f"{directory} has no {WEIGHTS}: name the directory of a PEFT adapter")
    try:
        config = (directory / CONFIG).read_bytes()
        weights = (directory / WEIGHTS).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read adapter {directory}: {error!s:.200}") from error
    refuse_pointer(directory / CONFIG, config)
    refuse_pointer(directory / WEIGHTS, weights)
    return config, weights


def _tensors(content: bytes, source: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file's bytes."""
    num_bytes = int.from_bytes(content[:8], "little")
    try:
        if num_bytes > MAX_JSON_BYTES:
            raise ValueError(f"its header has {num_bytes} bytes; at most {MAX_JSON_BYTES}")
        header = parse_object(content[8 : 8 + num_bytes], f"the header of {source}")
        if len(header) > _MAX_TENSORS:
            raise ValueError(f"it has {len(header)} tensors; at most {_MAX_TENSORS}")
        tensors: dict[str, torch.Tensor] = load(content)
        return tensors
    except CheckpointError:
        raise
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} is not a sound safetensors file ({error!s:.200}); save it again"
        ) from error


def _linears(
    tensors: dict[str, torch.Tensor], config: PeftConfig, source: str
) -> dict[str, Factors]:
    """Return the factors of each linear in `tensors`."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in sorted(tensors.items()):
        found = _KEY.fullmatch(key)
        if found is None or len(key) > _MAX_PATH:
            raise UnsupportedModelError(f"{source}: tensor {_kind(key)} is not supported")
        if tensor.dtype not in _DTYPES or tensor.ndim != 2 or 0 in tensor.shape:
            raise CheckpointError(
                f"{source}: {key} {shown(tuple(tensor.shape))} {tensor.dtype} must be a matrix in "
                "F32, F16 or BF16"
            )
        own = parts.setdefault(found["module"], {})
        if found["part"] in own:
            raise CheckpointError(f"{source}: {key} stands there twice")
        own[found["part"]] = tensor
    if not parts:
        raise CheckpointError(f"{source} has no tensors: it changes nothing")
    return {module: _factors(module, own, config, source) for module, own in parts.items()}


def _factors(module: str, own: dict[str, torch.Tensor], config: PeftConfig, source: str) -> Factors:
    if len(own) < 2:
        missing = "B" if "A" in own else "A"
        raise CheckpointError(f"{source}: {module} has no lora_{missing}.weight")
    if not config.aims_at(module):
        raise CheckpointError(
            f"{source}: {module} is not in target_modules {shown(list(config.targets or ()))} of "
            f"{CONFIG}"
        )
    a = own["A"]
    b = own["B"]
    rank = config.rank_of(module)
    if len(a) != rank or b.shape[1] != rank:
        raise CheckpointError(
            f"{source}: {module} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, but "
            f"{CONFIG} says rank {rank}"
        )
    for part, tensor in own.items():
        if not all(bool(end.isfinite()) for end in tensor.aminmax()):  # NaN is both of them
            raise CheckpointError(f"{source}: {module}.lora_{part} has numbers that are not finite")
    return Factors(a, b, config.scale_of(module))


def _kind(key: str) -> Any:
    """Return a tensor's name, with what it belongs to if that is known."""
    kinds = {
        "lora_embedding_": "of an embedding",
        "lora_magnitude_vector": "of DoRA",
        "lora_B.bias": "of lora_bias",
        "modules_to_save": "of modules_to_save",
    }
    kind = next((kind for part, kind in kinds.items() if part in key), "")
    return f"{shown(key)} {kind}".rstrip()
