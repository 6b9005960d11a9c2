"""nano-vllm's names below its front: what has their part here, for the error of an import.

Most have another interface here, so none of them is imported in a name's place.
"""

import functools
from collections.abc import Sequence as Seq
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import NoReturn

_BATCH = "nanovllm.attention.batch.Batch"
_BLOCKS = "nanovllm.scheduler.block_manager"
_DECODER = "nanovllm.models.decoder"
_ROTARY = "nanovllm.layers.rotary_embedding.RotaryEmbedding"

MOVED = {
    "nanovllm.engine.block_manager": {
        "Block": f"{_BLOCKS}.Block",
        "BlockManager": f"{_BLOCKS}.BlockManager",
    },
    "nanovllm.engine.model_runner": {"ModelRunner": "nanovllm.worker.model_runner.ModelRunner"},
    "nanovllm.engine.scheduler": {"Scheduler": "nanovllm.scheduler.scheduler.Scheduler"},
    "nanovllm.engine.sequence": dict.fromkeys(
        ("Sequence", "SequenceStatus"), "nanovllm.scheduler.sequence.Sequence"
    ),
    "nanovllm.layers.activation": {"SiluAndMul": "nanovllm.layers.activation.ActAndMul"},
    "nanovllm.layers.attention": dict.fromkeys(
        ("store_kvcache", "store_kvcache_kernel"), "nanovllm.attention.backend.Backend"
    ),
    "nanovllm.layers.linear": {"ReplicatedLinear": "nanovllm.layers.linear.LinearBase"},
    "nanovllm.layers.rotary_embedding": dict.fromkeys(("apply_rotary_emb", "get_rope"), _ROTARY),
    "nanovllm.layers.sampler": {"Sampler": "nanovllm.layers.sampler.draw"},
    "nanovllm.models.qwen3": {
        "Qwen3Attention": f"{_DECODER}.SelfAttention",
        "Qwen3MLP": f"{_DECODER}.GatedMLP",
        "Qwen3DecoderLayer": f"{_DECODER}.DecoderLayer",
        "Qwen3Model": f"{_DECODER}.Decoder",
    },
    "nanovllm.utils.context": dict.fromkeys(
        ("Context", "get_context", "set_context", "reset_context"), _BATCH
    ),
    "nanovllm.utils.loader": dict.fromkeys(
        ("load_model", "default_weight_loader"), "nanovllm.checkpoint.loader.load_weights"
    ),
}
"""By module of nano-vllm's and name: what has its part here. Modules that are there too have the
other names of nano-vllm's."""


def places(module: str, *names: str) -> str:
    """Return the message for names of nano-vllm's in one of its modules."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(MOVED[module][name], []).append(name)
    here = "; ".join(f"for {', '.join(moved)} see {place}" for place, moved in found.items())
    return f"{module} of nano-vllm is not here as it is there: {here}"


class MovedNames(MetaPathFinder):
    """Lets the modules that nano-vllm has too say where its other names are.

    Python asks it first. It finds what Python would find, and hides nothing.
    """

    def find_spec(
        self, fullname: str, path: Seq[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in MOVED else None
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                vars(module)["__getattr__"] = functools.partial(_refuse, fullname)
                run(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _refuse(module: str, name: str) -> NoReturn:
    """Raise ImportError for a name of nano-vllm's, AttributeError for any other.

    `from module import name` shows the message of an ImportError, not of an AttributeError.
    """
    if name in MOVED[module]:
        raise ImportError(places(module, name), name=module)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
