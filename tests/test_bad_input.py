"""Bad input raises a NanoVLLMError that names the value and the rule; the engine still works."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    NanoVLLMError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from nanovllm.worker.executor import InProcessExecutor
from tests.checkpoints import copy_checkpoint
from tests.helpers import assert_idle

PARAMS = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(random_model: str) -> LLM:
    return LLM(random_model, max_model_len=64)


@pytest.fixture
def works_after(llm: LLM) -> Any:
    """Check that the engine is idle after the test, and generates the same tokens as before."""
    before = llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids
    yield
    assert_idle(llm)
    assert llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)[0].token_ids == before


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], r"prompt 0: the prompt is empty"),
        ([[1], []], r"prompt 1: the prompt is empty"),
        ([[1] * 64], r"64 tokens; max_model_len 64 leaves room for 63"),
        ([[1] * 5000], r"5000 tokens"),
        ([[1, 1003]], r"prompt token 1 must be an integer from 0 to 1002, got 1003"),
        ([[-1]], r"from 0 to 1002, got -1"),
        ([[1.5]], r"prompt token 0 must be an integer .* got 1.5 \(float\)"),
        ([["a", "b"]], r"got 'a' \(str\)"),
        ([[True]], r"got True \(bool\)"),
        ([[None]], r"got None"),
        ([None], r"must be a string or a list of token ids, got NoneType"),
        ([b"text"], r"got bytes"),
        (None, r"prompts must be a string, token ids, or a list"),
        (7, r"got int"),
        ("text", r"has no tokenizer"),
        ([{"text": "x"}], r'one key, "prompt" or "prompt_token_ids"'),
    ],
)
def test_bad_prompt_is_refused(llm: LLM, prompts: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.generate(prompts, PARAMS, use_tqdm=False)


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize("params", [[PARAMS], [PARAMS] * 3, []])
def test_lists_of_unequal_length_are_refused(llm: LLM, params: list[SamplingParams]) -> None:
    with pytest.raises(InvalidRequestError, match=f"2 prompts but {len(params)} sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)


@pytest.mark.usefixtures("works_after")
@pytest.mark.parametrize("params", [{"temperature": 0}, 0.5, [PARAMS, 3], ["greedy", PARAMS]])
def test_sampling_params_of_the_wrong_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens must be an integer >= 1, got 0"),
        ({"temperature": float("nan")}, r"temperature must be a finite number >= 0, got nan"),
        ({"temprature": 1}, r"no field 'temprature'; did you mean 'temperature'"),
    ],
)
def test_bad_sampling_params_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_num_seq": 4}, ConfigError, r"no field 'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"block_size": 4}, ConfigError, r"block_size=4 .*: use kvcache_block_size"),
        ({"max_num_seqs": 0}, ConfigError, r"max_num_seqs must be an integer >= 1, got 0"),
        ({"dtype": "int3"}, ConfigError, r"dtype must be one of .* got 'int3'"),
        ({"device": "tpu"}, ConfigError, r"device must be .* got 'tpu'"),
        ({"device": "cuda:99"}, ConfigError, r"CUDA|GPUs"),
        ({"gpu_memory_utilization": 1.5}, ConfigError, r"from 0.01 to 1, got 1.5"),
        (
            {"num_kvcache_blocks": 3},
            OutOfMemoryError,
            r"3 blocks of 16 .* max_model_len 256 needs 16",
        ),
        ({"kv_cache_memory_bytes": 10}, OutOfMemoryError, r"holds 0 blocks"),
        ({"tensor_parallel_size": 0}, ConfigError, r"tensor_parallel_size must be"),
        ({"tensor_parallel_size": 2.0}, ConfigError, r"got 2.0 \(float\)"),
    ],
)
def test_bad_engine_options_are_refused(
    random_model: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(random_model, **options)


def copy_of(model: str, path: Path) -> Path:
    return Path(copy_checkpoint(model, path))


def test_truncated_weights_are_refused(random_model: str, tmp_path: Path) -> None:
    path = copy_of(random_model, tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        LLM(str(path.parent))


def test_corrupt_header_is_refused(random_model: str, tmp_path: Path) -> None:
    path = copy_of(random_model, tmp_path / "m") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:8] + b"\xff" * 100 + path.read_bytes()[108:])
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        LLM(str(path.parent))


def test_every_mismatched_weight_is_named(random_model: str, tmp_path: Path) -> None:
    path = copy_of(random_model, tmp_path / "m") / "model.safetensors"
    tensors = load_file(path)
    tensors["extra"] = tensors.pop("model.norm.weight")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:5].clone()
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        LLM(str(path.parent))
    for part in ("unexpected extra", "missing model.norm.weight", "misshapen model.embed_tokens"):
        assert part in str(caught.value)


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no config.json"):
        LLM(str(tmp_path))


def test_missing_directory_is_refused() -> None:
    with pytest.raises(CheckpointError, match="'/no/such/model' does not exist"):
        LLM("/no/such/model")


def test_hub_id_while_offline_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="cannot get 'nobody/nothing' from the hub"):
        LLM("nobody/nothing")


def test_unknown_architecture_is_refused(random_model: str, tmp_path: Path) -> None:
    path = copy_checkpoint(random_model, tmp_path / "m", architectures=["GPT5ForCausalLM"])
    with pytest.raises(UnsupportedModelError, match="GPT5ForCausalLM.*Qwen3ForCausalLM"):
        LLM(path)


def test_directory_without_safetensors_is_refused(random_model: str, tmp_path: Path) -> None:
    """Symptom: the model runs on uninitialised weights, as in a relative of this project."""
    path = copy_of(random_model, tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no .safetensors weights \(found pytorch_model.bin"):
        LLM(str(path))


def test_broken_tokenizer_is_refused_before_weights_load(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is read first: an exception's traceback would keep loaded weights alive."""
    path = copy_of(random_model, tmp_path / "m")
    monkeypatch.setattr(InProcessExecutor, "start", lambda self: pytest.fail("started"))
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot load the tokenizer"):
        LLM(str(path))


def test_all_errors_share_one_base_class() -> None:
    for error in (CheckpointError, ConfigError, InvalidRequestError, OutOfMemoryError):
        assert issubclass(error, NanoVLLMError)


@pytest.mark.usefixtures("works_after")
def test_numpy_tokens_are_accepted(llm: LLM) -> None:
    tokens = numpy.arange(1, 4)
    outputs = llm.generate([list(tokens)], PARAMS, use_tqdm=False)
    assert outputs[0].prompt_token_ids == [1, 2, 3]
    assert all(type(token) is int for token in outputs[0].prompt_token_ids)
