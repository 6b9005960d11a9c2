"""Each family's config.json, changed field by field: equal logits as transformers', or a refusal.

So a field that a family reads and its reference ignores is found, and the reverse. `FAMILY_CASES=12
pytest tests/models/test_config_fields.py` makes all changes.
"""

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto import modeling_auto

from nanovllm.errors import CheckpointError
from nanovllm.models.model_config import ONLY_SOME_READ
from nanovllm.models.registry import MODULES, model_class, read_config
from tests.checkpoints import random_model, write_json
from tests.models.comparison import FEW, run_in_chunks
from tests.models.family_cases import NESTED
from tests.models.family_configs import BY_THREE, BY_TWO, CONFIGS, LLAMA3, LONGROPE

MODEL_TYPES: dict[str, str] = {
    architecture: kind
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    for kind, architecture in mapping.items()
    if isinstance(architecture, str) and kind not in ("shieldgemma2", "internlm3", "iquestcoder")
}
"""By architecture, what transformers calls its configuration."""
ARCHITECTURES = [
    name
    for name in MODULES
    if name in MODEL_TYPES
    and "Unified" not in name
    and ("text_config" not in CONFIGS[name] or MODEL_TYPES.get(name) in NESTED)
]
"""Not those with a text model that is here already, and not encoders."""
ROPE, ORIGINAL = "rope_theta", "original_max_position_embeddings"
DIFFER = {
    ("Olmo3ForCausalLM", ROPE): "transformers 5 takes it for layers with full attention",
    ("Olmo3ForCausalLM", ORIGINAL): "transformers: only in rope_scaling",
    ("Phi3ForCausalLM", ORIGINAL): "transformers looks at each text",
    ("MiniCPM3ForCausalLM", ORIGINAL): "transformers: only in rope_scaling",
}
"""What is meant to differ, and how."""
BLOCKS = ["mlp", "moe", "attention", "mamba", "moe"]
PROMPT = random.Random(0).choices(range(300), k=45)
"""Longer than the windows of the configurations."""
NO_ARITHMETIC = {*PreTrainedConfig().to_dict(), "text_config", "use_cache", "initializer_range"}
NO_ARITHMETIC |= {"bos_token_id", "eos_token_id", "pad_token_id", "vocab_size"}
TOLERANCE = 1e-3
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512}
ZERO_MSCALE = {**YARN, "rope_theta": 500.0, "mscale": 1.0, "mscale_all_dim": 0.0, "beta_fast": 0}
FULL = ["full_attention"] * 6
ROPES = (
    {"rope_type": "default", "rope_theta": 500.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    {**YARN, "rope_theta": 500.0, "mscale": 0.8, "mscale_all_dim": 0.3},
    {**LLAMA3, "rope_theta": 500.0},
    {**LONGROPE, "rope_type": "longrope", "rope_theta": 500.0},
    {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
)
FLAGS = ("use_sliding_window", "enable_moe_block", "attn_output_gate", "use_qk_norm", "use_bias")
FLAGS = (*FLAGS, "use_bidirectional_attention", "is_causal", "tie_word_embeddings")
VALUES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ONLY_SOME_READ, (2.5,)),
    **dict.fromkeys((*FLAGS, "attention_bias", "attention_out_bias", "mlp_bias"), (True, False)),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ROPES),
    **dict.fromkeys(("hidden_act", "hidden_activation"), ("silu", "gelu", "gelu_pytorch_tanh")),
    **dict.fromkeys(("num_experts", "num_local_experts"), (4, 0)),
    "layer_types": (
        *(None, BY_TWO, BY_THREE, FULL, ["sliding_attention"] * 6),
        *(["linear_attention", "full_attention"] * 3, ["conv", "full_attention", "conv"] * 2),
    ),
    "no_rope_layers": (None, [0] * 6, [1] * 6, [0, 1, 1, 1, 0, 1]),
    "layer_rope_theta": (None, [0, 1e4, 5e3, 1e6, 0, 7e4]),
    "mlp_only_layers": ([], [0, 5]),
    "full_attn_idxs": ([0, 5],),
    "rope_theta": (500.0,),
    "rope_local_base_freq": (500.0,),
    "partial_rotary_factor": (0.5,),
    "sliding_window": (None, 5),
    "sliding_window_pattern": (2, "LLG"),
    "original_max_position_embeddings": (64,),
}
"""Of fields that are tried in the config.json of every family."""


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("text_config", config)
    return found


def base_config(architecture: str) -> dict[str, Any]:
    """Return the config.json of a small model, as transformers reads it, too."""
    kind, config = MODEL_TYPES[architecture], copy.deepcopy(CONFIGS[architecture])
    text_of(config).pop("torch_dtype")
    text_of(config).update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    if architecture == "Olmo3ForCausalLM":  # as published
        config |= {"rope_theta": 500_000, "rope_scaling": {**YARN, "attention_factor": 1.2}}
    if kind in NESTED:
        text_of(config)["model_type"] = "ministral3" if kind == "mistral3" else f"{kind}_text"
        config.pop("audio_config", None)
        config |= copy.deepcopy(NESTED[kind])
    return {**config, "architectures": [architecture], "model_type": kind, "dtype": "float32"}


def other_values(value: Any) -> tuple[Any, ...]:
    """Return values that a field may have that has this one."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (2 * value, None)
    return (2, 0.5, True) if value is None else (None,)


def changes(architecture: str) -> Iterator[tuple[str, Any]]:
    """Yield a field and another value of it, for all that the family and transformers have."""
    config = base_config(architecture)
    names = AutoConfig.for_model(**config).get_text_config().to_dict()
    names = {**names, **text_of(config)}
    for name in sorted({*names, *VALUES} - NO_ARITHMETIC):
        if (architecture, name) in DIFFER:
            continue
        values = VALUES.get(name) or other_values(names[name])
        yield from ((name, value) for value in values if value != names.get(name))


def changed_config(architecture: str, name: str, value: Any) -> dict[str, Any]:
    config = base_config(architecture)
    owner = config if name == "tie_word_embeddings" else text_of(config)
    owner[name] = copy.deepcopy(value)
    return config


def is_refused(config: dict[str, Any]) -> bool:
    """Return whether the field is refused here, whatever the weights."""
    try:
        found = read_config(config)
        with torch.device("meta"):
            model_class(found)(found, 4)
    except CheckpointError:
        return True
    return False


class Reference:
    """transformers' model of a config.json in `path`, whose weights are kept while they fit."""

    def __init__(self, architecture: str, path: Path) -> None:
        nested = MODEL_TYPES[architecture] in NESTED
        self._class: Any = AutoModelForImageTextToText if nested else AutoModelForCausalLM
        self._path = path
        self._shapes: list[Any] = []

    def logits(self, config: dict[str, Any]) -> torch.Tensor | None:
        """Write the config.json, with weights; return the logits, or None if transformers fails."""
        write_json(self._path / "config.json", config)
        try:
            found = AutoConfig.from_pretrained(self._path)
            with torch.device("meta"):
                meta = self._class.from_config(found)
            shapes = [(name, weight.shape) for name, weight in meta.named_parameters()]
            if shapes != self._shapes:
                shutil.rmtree(self._path)
                random_model(found, model_class=self._class).save_pretrained(self._path)
                write_json(self._path / "config.json", config)  # as users write it
                self._shapes = shapes
            model = self._class.from_pretrained(
                self._path, dtype=torch.float32, attn_implementation="eager"
            )
            if hasattr(model, "set_experts_implementation"):
                model.set_experts_implementation("eager")  # the default takes only some sizes
            with torch.inference_mode():
                logits: torch.Tensor = model.eval()(torch.tensor([PROMPT])).logits[0]
            return logits
        except Exception:  # it raises whatever comes
            self._path.mkdir(exist_ok=True)
            return None


def difference(architecture: str, path: Path, reference: Reference, name: str, value: Any) -> Any:
    """Return how far our logits are from transformers'; a word if one of both has none."""
    config = changed_config(architecture, name, value)
    if is_refused(config):
        return "refused"
    expected = reference.logits(config)
    if expected is None:
        return "only here"
    try:
        with torch.inference_mode():
            (logits,) = run_in_chunks(path, [PROMPT], [20], 16)
    except CheckpointError as error:
        return f"refused: {error}"
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.fixture
def beside(tmp_path: Path) -> Any:
    """Return a function: `difference` of an architecture's fields and values."""

    def run(architecture: str, chosen: list[tuple[str, Any]]) -> dict[str, Any]:
        path = tmp_path / "model"
        path.mkdir()
        reference = Reference(architecture, path)
        return {
            f"{name}={value}": difference(architecture, path, reference, name, value)
            for name, value in chosen
        }

    return run


@pytest.mark.thinned(6)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_field_does_what_it_does_there_or_is_refused(architecture: str, beside: Any) -> None:
    every = list(changes(architecture))
    random.Random(architecture).shuffle(every)
    found = beside(architecture, every[:3] if FEW else every)
    assert not {change: far for change, far in found.items() if is_far(far)}


def is_far(found: Any) -> bool:
    return isinstance(found, float) and not found <= TOLERANCE


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("architecture", "field", "value", "refused"),
    [
        ("Gemma3ForCausalLM", "attn_logit_softcapping", 2.5, False),
        ("Gemma3ForConditionalGeneration", "attn_logit_softcapping", 2.5, False),
        ("Gemma3ForConditionalGeneration", "final_logit_softcapping", 2.5, False),
        ("Gemma2ForCausalLM", "rope_local_base_freq", 500.0, True),
        ("MistralForCausalLM", "layer_types", FULL, False),
        ("MistralForCausalLM", "layer_types", BY_TWO, False),
        ("MistralForCausalLM", "rope_parameters", ROPES[-1], True),
        ("Exaone4ForCausalLM", "rope_parameters", ROPES[0], False),
        ("Olmo3ForCausalLM", "use_cache", True, False),
        ("Gemma4ForCausalLM", "partial_rotary_factor", 0.5, False),
        ("CohereForCausalLM", "use_qk_norm", True, True),
        ("Cohere2ForCausalLM", "use_parallel_block", False, True),
        ("BailingHybridForCausalLM", "partial_rotary_factor", 0.5, False),
        ("BailingHybridForCausalLM", "rotary_dim", 8, False),
        ("BailingHybridForCausalLM", "expert_swiglu_limit_list", [0.0] * 6, False),
        ("BailingHybridForCausalLM", "share_expert_swiglu_limit_list", [0.0] * 5 + [7.0], True),
        ("BailingHybridForCausalLM", "use_mla_nope", True, True),
        ("BambaForCausalLM", "partial_rotary_factor", 1.0, False),
        ("Ministral3ForCausalLM", "rope_parameters", ZERO_MSCALE, False),
        ("Gemma3ForCausalLM", "rope_local_base_freq", None, True),
        ("NemotronHForCausalLM", "moe_latent_size", 16, True),
        ("NemotronHForCausalLM", "mamba_n_groups", 4, False),
        ("NemotronHForCausalLM", "n_shared_experts", 2, True),
        ("NemotronHForCausalLM", "layers_block_type", [*BLOCKS, "mamba"], False),
    ],
)
def test_what_was_found(
    architecture: str, field: str, value: Any, refused: bool, beside: Any
) -> None:
    (found,) = beside(architecture, [(field, value)]).values()
    assert (found == "refused") == refused
    assert not is_far(found)
