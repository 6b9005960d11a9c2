"""Reads an adapter that PEFT has saved: adapter_config.json and adapter_model.safetensors.

Nothing in the files is trusted: what is read is checked, bounded, and hashed as it was read. Knows
no engine; `check_fits` gets the shapes of the model's linears.
"""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from nanovllm.errors import CheckpointError, InvalidRequestError, UnsupportedModelError
from nanovllm.features.lora.layer_parts import Slice
from nanovllm.features.lora.peft_config import PeftConfig, read_peft_config
from nanovllm.loading.files import (
    MAX_JSON_BYTES,
    check_file,
    local_path,
    parse_object,
    refuse_pointer,
)
from nanovllm.options.validation import listed, shown

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

    @property
    def nbytes(self) -> int:
        return sum(factors.a.nbytes + factors.b.nbytes for factors in self.linears.values())


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

    Args:
        linears: what `named_slices` returns.

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
        return "is of latent attention, which requests do not adapt: merge it by the option lora"
    return "is no linear of the model"


def adapter_files(path: str) -> list[Path]:
    """Return the files of the adapter in directory `path`."""
    return [Path(path).expanduser() / name for name in (CONFIG, WEIGHTS)]


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
