"""TRL's GRPOTrainer with nanovllm as its engine, in the trainer's process and on its CPU.

    from nanovllm.trl import GRPOTrainer

takes the arguments of `trl.GRPOTrainer`. Needs `pip install '.[trl]'`. Imports nothing else
of nanovllm before a class is asked for.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.trl.generation import EngineGeneration
    from nanovllm.trl.trainer import GRPOTrainer

__all__ = ["EngineGeneration", "GRPOTrainer"]


def __getattr__(name: str) -> Any:
    if name in __all__ and find_spec("trl") is None:
        raise ImportError(f"nanovllm.trl.{name} needs TRL: pip install '.[trl]'")
    if name == "GRPOTrainer":
        from nanovllm.trl.trainer import GRPOTrainer

        return GRPOTrainer
    if name == "EngineGeneration":
        from nanovllm.trl.generation import EngineGeneration

        return EngineGeneration
    raise AttributeError(f"module 'nanovllm.trl' has no attribute {name!r}")
