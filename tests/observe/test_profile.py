"""`start_profile` and `stop_profile`: their files, read back as JSON."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams, demo_model
from nanovllm.errors import ConfigError, InvalidRequestError
from tests.observe.test_trace import sequences

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "made when needed"


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(demo_model.MODEL, profile_dir=str(directory), max_model_len=128)


def read(path: str) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def test_a_profile_has_the_steps_and_what_torch_sees(llm: LLM, directory: Path) -> None:
    llm.generate(["Before"], PARAMS, use_tqdm=False)
    llm.start_profile()
    llm.generate(["A KV cache", "A token"], PARAMS, use_tqdm=False)
    files = llm.stop_profile()
    llm.generate(["After"], PARAMS, use_tqdm=False)
    assert sorted(files) == sorted(str(path) for path in directory.iterdir())
    engine, rank = files
    found = sequences(read(engine))
    assert len(found) == 2
    assert all(each["output_tokens"] == 12 for each in found)
    assert any(event.get("cat") == "cpu_op" for event in read(rank)["traceEvents"])
    assert os.stat(engine).st_mode & 0o077 == 0


def test_requests_that_run_when_it_begins_are_in_it(llm: LLM) -> None:
    """Their spans begin with the profile, and the rows that follow say in which state they are."""
    stream = llm.stream("A block table", PARAMS.clone(max_tokens=100))
    first = next(stream)
    llm.start_profile()
    list(stream)
    engine, _ = llm.stop_profile()
    (found,) = sequences(read(engine))
    assert found["start"] >= 0
    assert [state["name"] for state in found["states"]] == ["waiting", "decode"]
    assert first.outputs[0].token_ids
    assert found["output_tokens"] == 100


def test_it_may_begin_and_end_in_other_threads(llm: LLM) -> None:
    for method in (llm.start_profile, llm.stop_profile):
        thread = threading.Thread(target=method)
        thread.start()
        llm.generate(["Hello"], PARAMS, use_tqdm=False)
        thread.join()
    with pytest.raises(InvalidRequestError, match="no profile runs"):
        llm.stop_profile()


def test_what_cannot_be_is_refused_and_the_engine_goes_on(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"no profile runs: start_profile\(\)"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(InvalidRequestError, match=r"runs already: stop_profile\(\)"):
        llm.start_profile()
    assert len(llm.stop_profile()) == 2
    blocked = tmp_path / "file"
    blocked.write_text("")
    other = LLM(demo_model.MODEL, profile_dir=str(blocked / "below"), max_model_len=64)
    with pytest.raises(ConfigError, match=r"profile_dir .* cannot be made: Not a directory"):
        other.start_profile()
    (output,) = other.generate(["Hello"], PARAMS, use_tqdm=False)
    assert len(output.token_ids) == 12
    other.shutdown()


def test_without_a_directory_there_are_no_profiles(demo_llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="profile_dir is None"):
        demo_llm.start_profile()
