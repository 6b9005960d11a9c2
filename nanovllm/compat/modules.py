"""vLLM's modules and names, for imports in which only `vllm` was changed to `nanovllm`.

`from nanovllm.engine.arg_utils import EngineArgs` works although there is no such file: `install`
adds an importer, which Python asks for modules that it does not find. It makes those of vLLM's that
scripts import, and says of some others what to use instead. Imports nothing before it is asked.
"""

import functools
import importlib
import sys
from collections.abc import Sequence as Seq
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from nanovllm.compat.moved import MOVED, MovedNames, places

_ARGS = "nanovllm.compat.engine_args"
_SCRIPT = "nanovllm.compat.script_names"

HOMES = {
    "LLM": "nanovllm.compat.methods",
    "AsyncLLM": "nanovllm.compat.generation",
    "Config": "nanovllm.options.config",
    **dict.fromkeys(("SamplingParams", "RequestOutputKind"), "nanovllm.options.sampling_params"),
    "StructuredOutputsParams": "nanovllm.options.structured_outputs",
    "LLMEngine": "nanovllm.compat.llm_engine",
    **dict.fromkeys(("EngineArgs", "AsyncEngineArgs", "FlexibleArgumentParser"), _ARGS),
    **dict.fromkeys(("AsyncLLMEngine", "TextPrompt", "TokensPrompt", "PromptType"), _SCRIPT),
    **dict.fromkeys(("Metric", "Counter", "Gauge", "Vector", "Histogram"), "nanovllm.outputs"),
    "cleanup_dist_env_and_memory": _SCRIPT,
}
"""By name of vLLM's or nano-vllm's: the module here that has it."""

_PROMPTS = "TextPrompt TokensPrompt PromptType"

MODULES = {
    "nanovllm": f"LLM AsyncLLM EngineArgs AsyncEngineArgs LLMEngine AsyncLLMEngine {_PROMPTS}",
    "nanovllm.config": "Config",
    "nanovllm.sampling_params": "SamplingParams RequestOutputKind StructuredOutputsParams",
    "nanovllm.engine": "",
    "nanovllm.engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "nanovllm.engine.async_llm_engine": "AsyncLLMEngine",
    "nanovllm.entrypoints": "",
    "nanovllm.entrypoints.llm": "LLM",
    "nanovllm.inputs": _PROMPTS,
    "nanovllm.inputs.data": _PROMPTS,
    "nanovllm.distributed": "cleanup_dist_env_and_memory",
    "nanovllm.distributed.parallel_state": "cleanup_dist_env_and_memory",
    "nanovllm.utils": "FlexibleArgumentParser",
    "nanovllm.utils.argparse_utils": "FlexibleArgumentParser",
    "nanovllm.v1": "",
    "nanovllm.v1.engine": "",
    "nanovllm.v1.engine.async_llm": "AsyncLLM",
    "nanovllm.v1.engine.llm_engine": "LLMEngine",
    "nanovllm.v1.metrics": "",
    "nanovllm.v1.metrics.reader": "Metric Counter Gauge Vector Histogram",
}
"""By module of vLLM's or nano-vllm's: the names of HOMES that it has."""

_TEXT_ONLY = "the models here read text only"
_GENERATES = "the models here generate text; use sentence-transformers for embeddings and scores"
_OPTIONS = "LLM and AsyncLLM take all options by name, and dictionaries for groups of them"
_BEAMS = "there is no beam search; use SamplingParams(n=...)"
_MODELS = "models are files of nanovllm/models; others cannot be registered"

MISSING = {
    **dict.fromkeys(("multimodal", "assets", "MultiModalDataDict"), _TEXT_ONLY),
    **dict.fromkeys(("PoolingParams", "pooling_params", "PoolingOutput"), _GENERATES),
    **dict.fromkeys(("EmbeddingRequestOutput", "ScoringRequestOutput"), _GENERATES),
    **dict.fromkeys(("ClassificationRequestOutput", "PoolingRequestOutput"), _GENERATES),
    **dict.fromkeys(("BeamSearchParams", "beam_search"), _BEAMS),
    **dict.fromkeys(("ModelRegistry", "model_executor"), _MODELS),
    **dict.fromkeys(("VllmConfig", "ModelConfig", "CompilationConfig"), _OPTIONS),
    **dict.fromkeys(("KVTransferConfig", "ProfilerConfig", "AttentionConfig"), _OPTIONS),
    "GuidedDecodingParams": "use SamplingParams(structured_outputs=StructuredOutputsParams(...))",
    "sample": "use SamplingParams(logits_processors=[function]), a list for each request",
    "initialize_ray_cluster": 'use distributed_executor_backend="ray"',
    "tokenizers": "get_tokenizer() of LLM returns the tokenizer",
    "transformers_utils": "get_tokenizer() of LLM returns the tokenizer",
    "benchmarks": "use `nanovllm bench serve`, or data sets of your own",
    "platforms": "use torch.cuda.is_available()",
    "logger": "use logging.getLogger(__name__)",
    "envs": "there are no VLLM_ variables; use the options of LLM",
    "plugins": "there are no plugins",
}
"""By name, or last part of a module's name: what to use instead of vLLM's."""


def install() -> None:
    """Let Python import vLLM's modules; a second call does nothing."""
    if not any(isinstance(finder, _Importer) for finder in sys.meta_path):
        sys.meta_path.append(_Importer())
        sys.meta_path.insert(0, MovedNames())
    for name, find in (("nanovllm", attribute), ("nanovllm.outputs", _refuse)):
        vars(sys.modules[name])["__getattr__"] = functools.partial(find, name)


def attribute(module: str, name: str) -> Any:
    """Return what a name of vLLM's is here.

    Raises:
        AttributeError: the module has no such name; the message says what to use.
    """
    if name not in MODULES.get(module, "").split():
        raise AttributeError(_message(module, name))
    return getattr(importlib.import_module(HOMES[name]), name)


class _Importer(MetaPathFinder, Loader):
    """Makes vLLM's modules. Python asks it last, so it never hides a file."""

    def find_spec(
        self, fullname: str, path: Seq[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        module, _, name = fullname.rpartition(".")
        if module.partition(".")[0] != "nanovllm":
            return None
        if fullname in MODULES:
            return ModuleSpec(fullname, self, is_package=True)  # so that it is asked for names, too
        if name in MODULES.get(module, "").split():
            # `from module import name` comes here for a name that a real package lacks, and then
            # looks into the package again.
            setattr(sys.modules[module], name, attribute(module, name))
        elif name in MISSING:
            raise ImportError(_message(module, name), name=fullname)
        elif fullname in MOVED:
            raise ImportError(places(fullname, *MOVED[fullname]), name=fullname)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Let the names of a new module be found when they are asked for."""
        vars(module)["__getattr__"] = functools.partial(attribute, module.__name__)


def _refuse(module: str, name: str) -> NoReturn:
    """Raise ImportError for a name of vLLM's, AttributeError for any other.

    `from module import name` shows the message of an ImportError, not of an AttributeError.
    """
    raise (ImportError if name in MISSING else AttributeError)(_message(module, name))


def _message(module: str, name: str) -> str:
    advice = f": {MISSING[name]}" if name in MISSING else ""
    return f"module {module!r} has no attribute {name!r}{advice}"
