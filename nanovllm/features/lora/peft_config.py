"""Reads PEFT's adapter_config.json: the rank and the scale of each linear.

Anything that is not implemented is refused by name.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.options.validation import shown
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
        raise UnsupportedModelError(
            f"{source}: peft_type {shown(fields.get('peft_type'))} is not supported (only LORA)"
        )
    for name, value in fields.items():
        if name not in _WITHOUT_MEANING and value not in (None, False, [], {}, ""):
            raise UnsupportedModelError(
                f"{source}: {shown(name)} {shown(value)} is not supported; merge the adapter into "
                "the model with peft's merge_and_unload"
            )
    if fields.get("bias", "none") != "none":
        raise UnsupportedModelError(
            f"{source}: bias {shown(fields['bias'])} is not supported (only none)"
        )
    _check_init(fields.get("init_lora_weights", True), source)
    rslora = fields.get("use_rslora", False)
    if not isinstance(rslora, bool):
        raise CheckpointError(f"{source}: use_rslora must be true or false, is {shown(rslora)}")
    return PeftConfig(
        _rank(fields.get("r", 8), "r", source),
        _alpha(fields.get("lora_alpha", 8), "lora_alpha", source),
        rslora,
        _pattern(fields.get("rank_pattern"), "rank_pattern", _rank, source),
        _pattern(fields.get("alpha_pattern"), "alpha_pattern", _alpha, source),
        _targets(fields.get("target_modules"), source),
    )


def _check_init(init: Any, source: str) -> None:
    if not isinstance(init, bool) and init not in _PLAIN_INITS:
        raise UnsupportedModelError(
            f"{source}: init_lora_weights {shown(init)} may have changed the base's weights, too: "
            "save the adapter with peft's path_initial_model_for_weight_conversion"
        )


def _targets(value: Any, source: str) -> tuple[str, ...] | None:
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise CheckpointError(
            f"{source}: target_modules must be a string or a list of strings, is {shown(value)}"
        )
    return tuple(value)


def _rank(value: Any, name: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_RANK:
        raise CheckpointError(
            f"{source}: {name} must be an integer from 1 to {MAX_RANK}, is {shown(value)}"
        )
    return value


def _alpha(value: Any, name: str, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
        raise CheckpointError(
            f"{source}: {name} must be a number of at most a million, is {shown(value)}"
        )
    return float(value)


def _pattern(
    value: Any, name: str, check: Callable[[Any, str, str], T], source: str
) -> Patterns[T]:
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
        (_end(key, name, source), check(number, f"{name} of {shown(key)}", source))
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
