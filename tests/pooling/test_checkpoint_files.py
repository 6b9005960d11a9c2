"""The files of sentence-transformers: what they say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.pooling.checkpoint_files import PoolingSettings, read_settings
from nanovllm.loading.hub import Checkpoint

MODELS = "sentence_transformers.models"
TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
FILES = {
    "modules": "modules.json",
    "transformer": "sentence_bert_config.json",
    "pooling": "1_Pooling/config.json",
    "dense": "2_Dense/config.json",
    "prompts": "config_sentence_transformers.json",
}


def pooled(**fields: Any) -> dict[str, Any]:
    """Return files with a Pooling of these fields."""
    return {"modules": [TRANSFORMER, POOLING], "pooling": fields}


def dense(**fields: Any) -> dict[str, Any]:
    """Return files with a Dense of these fields."""
    sizes = {"in_features": 8, "out_features": 8}
    return {"modules": [TRANSFORMER, POOLING, DENSE], "dense": {**sizes, **fields}}


def read(
    path: Path, *, config: dict[str, Any] | None = None, model: str = "model", **files: Any
) -> PoolingSettings:
    """Return the settings of a checkpoint with these files; None: it lacks the file."""
    for name, place in FILES.items():
        (path / place).parent.mkdir(exist_ok=True)
        if files.get(name) is None:
            (path / place).unlink(missing_ok=True)
        else:
            (path / place).write_text(json.dumps(files[name]))
    return read_settings(Checkpoint(path, config or {}, {}), model)


PLAIN = pooled()


def test_without_files_the_last_state_is_normalised(tmp_path: Path) -> None:
    assert read(tmp_path) == PoolingSettings(pooling="last", normalize=True, similarity="cosine")
    for stored, pooling in ((0, "last"), (1, "mean"), (2, "cls"), (3, "last")):  # of a GGUF file
        assert read(tmp_path, config={"pooling_type": stored}).pooling == pooling


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
        ({"embedding_dimension": 8}, "mean"),
        ({"pooling_mode": "cls", "include_prompt": False}, "cls"),
    ],
)
def test_poolings(tmp_path: Path, pooling: dict[str, Any], expected: str) -> None:
    found = read(tmp_path, modules=[TRANSFORMER, POOLING, NORMALIZE], pooling=pooling)
    assert (found.pooling, found.normalize) == (expected, True)
    found = read(tmp_path, modules=[TRANSFORMER, POOLING], pooling=pooling)
    assert (found.pooling, found.normalize) == (expected, False)


def test_prompts_and_similarity(tmp_path: Path) -> None:
    prompts = {"query": "Q: ", "document": ""}
    given = {"prompts": prompts, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    found = read(tmp_path, prompts=given)
    assert (found.prompts, found.default_prompt_name, found.similarity) == (prompts, "query", "dot")


def test_rerankers(tmp_path: Path) -> None:
    assert read(tmp_path, model="Qwen/Qwen3-Reranker-0.6B").answers == ("no", "yes")
    assert read(tmp_path, model="Qwen/Qwen3-Embedding-0.6B").answers == ()
    config = {"classifier_from_token": ["false", "true"]}
    assert read(tmp_path, config=config).answers == ("false", "true")
    score = {"path": "1_Pooling", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
    tokens = {"true_token_id": 9, "false_token_id": 2}
    found = read(tmp_path, modules=[TRANSFORMER, score], pooling=tokens)
    assert (found.answers, found.activation) == ((2, 9), "sigmoid")
    label = {"architectures": ["Qwen3ForSequenceClassification"]}
    found = read(tmp_path, config=label, model="Qwen3-Reranker-0.6B-seq-cls")
    assert (found.answers, found.activation, found.asks) == ((), "sigmoid", True)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"modules": [{**POOLING, "type": "x.Pooling"}]},
            "type: string should match .*, got 'x.Pooling'",
        ),
        ({"modules": [{**POOLING, "type": f"{MODELS}.LSTM"}]}, "module '.*LSTM' is not supported"),
        ({"modules": [POOLING]}, "the modules Pooling are not supported"),
        ({"modules": [TRANSFORMER, NORMALIZE, POOLING]}, "Normalize, Pooling are not supported"),
        ({"modules": []}, "a list of 1 to 32 modules"),
        (pooled(in_features=8), "in_features: this field is not"),
        (dense(use_residual=True), "use_residual: .*, got True"),
        (dense(activation_function="my.Act"), "activation_function: .*, got 'my.Act'"),
        (dense(module_input_name="token_embeddings"), "module_input_name: .*, got 'token_emb"),
        ({**PLAIN, "transformer": {"query_length": 8}}, "query_length: .*, got 8"),
        (
            {**PLAIN, "transformer": {"model_args": {"a": 1}}},
            "model_args.a.*: input should be 'trust_remote_code'",
        ),
        (
            {**PLAIN, "transformer": {"processing_kwargs": {"text": {}}}},
            "processing_kwargs.text.*chat_template",
        ),
        ({"modules": [{**POOLING, "path": "../other"}]}, "path '../other' must be a folder"),
        ({"modules": [{**POOLING, "path": "/etc"}]}, "path '/etc' must be a folder"),
        (pooled(pooling_mode="max"), "'mean' or 'cls', got 'max'"),
        (pooled(pooling_mode=["mean", "cls"]), r"got \['mean', 'cls'\]"),
        (
            {
                **pooled(pooling_mode="cls", include_prompt=False),
                "prompts": {"prompts": {"query": "Q: "}},
            },
            "include_prompt false",
        ),
        (pooled(pooling_mode="mean", window=7), "window: this field is not supported, got 7"),
        ({"prompts": {"model_type": "SparseEncoder"}}, "model_type: input .*, got 'SparseEncoder'"),
        ({"prompts": {"truncate_dim": 0}}, "truncate_dim: .*, got 0"),
        ({"modules": {"a": 1}}, "must hold a list"),
        ({"modules": [7]}, "modules.json: .*, got 7"),
        ({"prompts": {"prompts": {"query": 7}}}, "prompts.query: .* valid string, got 7"),
        ({"prompts": {"default_prompt_name": "x"}}, "default_prompt_name 'x' is none of"),
        ({"prompts": {"similarity_fn_name": "cos"}}, "similarity_fn_name: .*, got 'cos'"),
        ({"config": {"classifier_from_token": "yes"}}, "classifier_from_token must be a list"),
    ],
)
def test_what_is_refused(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(tmp_path, **files)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
KINDS = ("Transformer", "Pooling", "Normalize", "LogitScore", "Dense", "LayerNorm")
MODULE = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from([f"{MODELS}.{kind}" for kind in KINDS]) | JSON,
        "path": st.just("1_Pooling") | JSON,
    },
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "pooling_mode": st.sampled_from(["mean", "cls", "lasttoken"]) | JSON,
        "pooling_mode_mean_tokens": JSON,
        "include_prompt": JSON,
        "true_token_id": JSON,
        "false_token_id": JSON,
        "prompts": JSON,
        "default_prompt_name": JSON,
        "similarity_fn_name": JSON,
    },
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(MODULE, max_size=3).map(lambda given: [TRANSFORMER, *given]) | JSON, SETTINGS, SETTINGS
)
def test_any_files_are_read_or_refused(
    tmp_path: Path, modules: Any, pooling: dict[str, Any], prompts: dict[str, Any]
) -> None:
    try:
        found = read(tmp_path, modules=modules, pooling=pooling, prompts=prompts)
    except CheckpointError:
        return
    assert found.pooling in ("last", "mean", "cls")
    assert found.default_prompt_name is None or found.default_prompt_name in found.prompts
