"""The files of sentence-transformers: what they say, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from nanovllm.errors import CheckpointError, UnsupportedModelError
from nanovllm.features.pooling.checkpoint_files import PoolingSettings, read_settings
from nanovllm.loading.hub import Checkpoint

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def read(
    path: Path,
    *,
    modules: Any = None,
    pooling: Any = None,
    prompts: Any = None,
    config: dict[str, Any] | None = None,
    model: str = "model",
) -> PoolingSettings:
    """Return the settings of a checkpoint with these files; None: it lacks the file."""
    (path / "1_Pooling").mkdir(exist_ok=True)
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "config_sentence_transformers.json": prompts,
    }
    for name, value in files.items():
        if value is None:
            (path / name).unlink(missing_ok=True)
        else:
            (path / name).write_text(json.dumps(value))
    return read_settings(Checkpoint(path, config or {}, {}), model)


def test_without_files_the_last_state_is_normalised(tmp_path: Path) -> None:
    assert read(tmp_path) == PoolingSettings(pooling="last", normalize=True, similarity="cosine")


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean", "embedding_dimension": 8}, "mean"),
        ({"pooling_mode": ["lasttoken"]}, "last"),
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
    assert read(tmp_path, model="Qwen/Qwen3-Embedding-0.6B").answers is None
    config = {"classifier_from_token": ["false", "true"]}
    assert read(tmp_path, config=config).answers == ("false", "true")
    score = {"path": "1_Pooling", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}
    tokens = {"true_token_id": 9, "false_token_id": 2}
    assert read(tmp_path, modules=[TRANSFORMER, score], pooling=tokens).answers == (2, 9)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": [{**POOLING, "type": "x.Dense"}]}, "module 'Dense' is not supported"),
        ({"modules": [{**POOLING, "path": "../other"}]}, "path '../other' must be a folder"),
        ({"modules": [{**POOLING, "path": "/etc"}]}, "path '/etc' must be a folder"),
        ({"modules": [POOLING], "pooling": {"pooling_mode": "max"}}, "pooling 'max' is not"),
        ({"modules": [POOLING], "pooling": {}}, "pooling without a mode is not supported"),
        ({"modules": [POOLING], "pooling": {"pooling_mode": ["mean", "cls"]}}, "'mean', 'cls'"),
        (
            {"modules": [POOLING], "pooling": {"pooling_mode": "mean", "include_prompt": False}},
            "include_prompt false",
        ),
        ({"modules": {"a": 1}}, "must hold a list"),
        ({"modules": [7]}, "must have a type and a path, is 7"),
        ({"prompts": {"prompts": {"query": 7}}}, "prompts must be texts by name"),
        ({"prompts": {"default_prompt_name": "x"}}, "default_prompt_name 'x' is none of"),
        ({"prompts": {"similarity_fn_name": "cos"}}, "similarity_fn_name must be one of"),
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
MODULE = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["a.Pooling", "Normalize", "LogitScore"]) | JSON,
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
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(MODULE, max_size=3) | JSON, SETTINGS, SETTINGS)
def test_any_files_are_read_or_refused(
    tmp_path: Path, modules: Any, pooling: dict[str, Any], prompts: dict[str, Any]
) -> None:
    try:
        found = read(tmp_path, modules=modules, pooling=pooling, prompts=prompts)
    except CheckpointError:
        return
    assert found.pooling in ("last", "mean", "cls")
    assert found.default_prompt_name is None or found.default_prompt_name in found.prompts
