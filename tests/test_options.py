"""Options of the engine that change what is loaded, and parameters of single requests."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, Config, RequestOutputKind, SamplingParams, demo_model
from nanovllm.engine.input_processor import InputProcessor
from nanovllm.errors import CheckpointError, InvalidRequestError
from nanovllm.loading.hub import configured_checkpoint
from tests.checkpoints import copy_checkpoint


def test_tokenizer_of_another_directory(make_llm: Any, random_model: str) -> None:
    """The random model has no tokenizer; the demo model's fits it."""
    llm = make_llm(random_model, tokenizer=demo_model.MODEL, max_model_len=48)
    text = make_llm(demo_model.MODEL, max_model_len=64).get_tokenizer().encode("Hello!")
    output = llm.generate("Hello!", SamplingParams(max_tokens=4), use_tqdm=False)[0]
    assert output.prompt_token_ids == text
    assert output.text


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        ("/no/such/directory", "tokenizer directory '/no/such/directory' does not exist"),
        ("{random_model}", "has no tokenizer.json"),
        ("{random_model}/config.json", "is a file; give the directory"),
    ],
)
def test_tokenizer_that_is_not_there(random_model: str, tokenizer: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        LLM(demo_model.MODEL, tokenizer=tokenizer.format(random_model=random_model))


def test_no_tokenizer(make_llm: Any) -> None:
    llm = make_llm(demo_model.MODEL, skip_tokenizer_init=True, max_model_len=64)
    assert llm.get_tokenizer() is None
    output = llm.generate([72, 105], SamplingParams(max_tokens=4), use_tqdm=False)[0]
    assert len(output.token_ids) == 4
    assert output.text == ""
    with pytest.raises(InvalidRequestError, match="has no tokenizer, so prompts must be lists"):
        llm.generate("Hi", use_tqdm=False)


def test_hf_overrides_replace_fields_of_config_json(make_llm: Any, random_model: str) -> None:
    """YaRN makes four times as many positions."""
    config = json.loads((Path(random_model) / "config.json").read_text())
    limit = config["max_position_embeddings"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": limit}
    overrides = {"rope_scaling": yarn}
    llm = make_llm(random_model, hf_overrides=overrides, max_model_len=3 * limit, max_num_seqs=1)
    assert llm.engine.worker_info.max_model_len == 3 * limit
    with pytest.raises(CheckpointError, match="num_hidden_layers must be an integer from 1"):
        LLM(random_model, hf_overrides={"num_hidden_layers": 0})


def test_download_dir_reaches_huggingface_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def snapshot_download(model: str, **options: Any) -> str:
        asked.append((model, options["cache_dir"], options["revision"]))
        return demo_model.MODEL

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        configured_checkpoint(Config("org/model", download_dir="~/downloads"))
    configured_checkpoint(Config("org/model"))
    assert asked == [("org/model", str(tmp_path / "downloads"), None), ("org/model", None, None)]
    asked.clear()
    llm = LLM("org/model", revision="v1", download_dir=tmp_path, tokenizer="org/other")
    llm.shutdown()
    place = str(tmp_path)
    wanted = {("org/model", place, "v1"), ("org/other", place, None)}
    assert set(asked) == wanted
    assert asked.count(("org/model", place, "v1")) == 2  # the config, then the weights


def test_generation_config_chooses_the_defaults(
    make_llm: Any, random_model: str, tmp_path: Path
) -> None:
    recommended = {"temperature": 0.5, "top_k": 7, "eos_token_id": [7, 11]}
    model = copy_checkpoint(random_model, tmp_path / "model", generation_config=recommended)
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_p": 0.25, "eos_token_id": 5}')
    for value, params, eos in (
        ("auto", SamplingParams(temperature=0.5, top_k=7), {7, 11}),
        ("vllm", SamplingParams(), {7, 11}),
        (other, SamplingParams(top_p=0.25), {5}),
    ):
        llm = make_llm(model, generation_config=value, max_model_len=48)
        assert llm.get_default_sampling_params() == params
        assert llm.engine.scheduler.eos_token_ids == eos
    with pytest.raises(CheckpointError, match=r"has no generation_config\.json"):
        LLM(model, generation_config=tmp_path)


@pytest.mark.parametrize(
    ("max_logprobs", "asked", "limit"),
    [(2, 3, 2), (1002, -1, 1002), (0, 1, 0), (-1, 1004, 1003)],
)
@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_max_logprobs_are_refused(
    name: str, max_logprobs: int, asked: int, limit: int
) -> None:
    processor = InputProcessor(
        None, vocab_size=1003, max_model_len=48, seed=0, max_logprobs=max_logprobs
    )
    with pytest.raises(
        InvalidRequestError, match=f"^{name} {asked} asks .*max_logprobs is {limit}"
    ):
        processor.make_request([1], SamplingParams(**{name: asked}))
    processor.make_request([1], SamplingParams(**{name: limit}))


@pytest.mark.parametrize("stop", [(), ("token", "blocks")])
def test_output_kinds_of_a_stream(demo_llm: LLM, stop: tuple[str, ...]) -> None:
    params = SamplingParams(
        1.3, 20, seed=3, n=2, stop=stop, logprobs=1, prompt_logprobs=1, ignore_eos=True
    )
    prompt = "What is a KV cache?"
    (expected,) = demo_llm.generate(prompt, params, use_tqdm=False)
    wanted = {c.index: c for c in expected.outputs}

    deltas = list(demo_llm.stream(prompt, params))
    whole = list(demo_llm.stream(prompt, params.clone(output_kind=RequestOutputKind.CUMULATIVE)))
    assert len(whole) == len(deltas)
    so_far = {0: "", 1: ""}
    for delta, output in zip(deltas, whole, strict=True):
        assert output.prompt_logprobs == expected.prompt_logprobs
        assert [c.index for c in output.outputs] == [c.index for c in delta.outputs]
        for new, completion in zip(delta.outputs, output.outputs, strict=True):
            so_far[new.index] += new.text
            number = len(completion.token_ids)
            assert completion.text == so_far[new.index]
            assert completion.token_ids == wanted[new.index].token_ids[:number]
            assert completion.logprobs == (wanted[new.index].logprobs or [])[:number]
            if completion.finish_reason:
                assert completion == wanted[new.index]
    final = params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
    (only,) = demo_llm.stream(prompt, final)
    assert only.outputs == expected.outputs
    assert only.prompt_logprobs == expected.prompt_logprobs
    for kind in RequestOutputKind:
        (output,) = demo_llm.generate(prompt, params.clone(output_kind=kind), use_tqdm=False)
        assert output.outputs == expected.outputs
