"""Pictures together with what else an engine does."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.features.vision.scheduling import EncoderHook
from nanovllm.kernels.cpu.library import library
from nanovllm.options.lora_request import LoRARequest
from tests.lora.adapters import linears_of, merge, write_adapter
from tests.vision.conftest import FEW
from tests.vision.pictures import PARAMS, noise, told
from tests.vision.qwen import PICTURE

TEXT = "What is paged attention?"
PICTURES = {"image": [noise(40, 70, 3), noise(61, 17, 4)]}
PROMPT = {"prompt": f"{TEXT}{PICTURE} and {PICTURE}{TEXT}", "multi_modal_data": PICTURES}
OTHER = {**PROMPT, "multi_modal_data": {"image": PICTURES["image"][::-1]}}
Make = Callable[..., LLM]


def answers(llm: LLM) -> list[tuple[list[int], float]]:
    return [told(found) for found in llm.generate([PROMPT, OTHER, TEXT], PARAMS, use_tqdm=False)]


def encoded(llm: LLM) -> int:
    count: int = llm.engine.scheduler.hooks[-1].num_encoded  # type: ignore[attr-defined]
    return count


@pytest.mark.skipif(library() is None, reason="no compiler here")
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4"])
def test_quantized_text_models(qwen: Any, make_llm: Make, quantization: str) -> None:
    """The tower stays as it is; bits do not depend on the batch."""
    llm = make_llm(qwen("qwen3_5"), dtype="bfloat16", quantization=quantization)
    first = answers(llm)
    assert first == answers(llm)
    small = make_llm(
        qwen("qwen3_5"), dtype="bfloat16", quantization=quantization, max_num_batched_tokens=11
    )
    assert answers(small) == first


def test_sleep_forgets_pictures_and_not_how_to_read_them(qwen: Any, make_llm: Make) -> None:
    llm = make_llm(qwen("qwen3_vl"), dtype="bfloat16")
    expected = answers(llm)
    assert encoded(llm) == 2
    llm.sleep(level=1)
    llm.wake_up()
    assert answers(llm) == expected
    assert encoded(llm) == 4
    assert llm.reset_prefix_cache()
    assert answers(llm) == expected
    assert encoded(llm) == 6


def test_new_weights_of_the_tower(qwen: Any, make_llm: Make) -> None:
    """A picture is encoded anew, by them: they are those of another engine then."""
    path = qwen("qwen3_vl")
    llm = make_llm(path, dtype="bfloat16")
    before = answers(llm)
    tensors = load_file(path / "model.safetensors")
    changed = {n: t * 0.5 for n, t in tensors.items() if n.startswith("model.visual.blocks.")}
    llm.update_weights(changed.items())
    found = answers(llm)
    assert found[2] == before[2]
    assert found[:2] != before[:2]
    llm.update_weights({n: tensors[n] for n in changed}.items())
    assert answers(llm) == before


def test_pictures_come_back_from_a_directory(qwen: Any, make_llm: Make, tmp_path: Path) -> None:
    """Another engine finds their KV there, and encodes no more than its last block needs."""
    path = qwen("qwen3_vl")
    first = make_llm(path, dtype="bfloat16", kv_cache_dir=str(tmp_path))
    expected = answers(first)
    first.shutdown()
    second = make_llm(path, dtype="bfloat16", kv_cache_dir=str(tmp_path))
    (output,) = second.generate(PROMPT, PARAMS, use_tqdm=False)
    assert told(output) == expected[0]
    assert output.num_cached_tokens
    assert encoded(second) <= 1
    assert answers(second) == expected


def test_grammars_and_prompt_logprobs(qwen: Any, make_llm: Make) -> None:
    llm = make_llm(qwen("qwen3_vl"), dtype="bfloat16")
    plain = answers(llm)[0]
    params = PARAMS.clone(prompt_logprobs=1)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert told(output) == plain
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    form: Any = {"regex": "(yes|no)"}
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=form)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert output.outputs[0].text in ("yes", "no")


def test_adapters_of_the_text_model(qwen: Any, make_llm: Make, tmp_path: Path) -> None:
    """With a picture, they do what their weights do when added to the model's."""
    path = qwen("qwen3_vl")
    linears = linears_of(str(path))
    adapter = write_adapter(tmp_path / "adapter", linears, size=1.0)
    merged = merge(str(path), adapter, tmp_path / "merged", lambda _: 2.0)
    llm = make_llm(path, dtype="float32", enable_lora=True)
    plain = told(llm.generate(PROMPT, PARAMS, use_tqdm=False)[0])
    request = LoRARequest("a", 1, adapter)
    (output,) = llm.generate(PROMPT, PARAMS, use_tqdm=False, lora_request=request)
    tokens, total = told(output)
    expected, expected_total = answers(make_llm(Path(merged), dtype="float32"))[0]
    assert tokens == expected != plain[0]
    assert total == pytest.approx(expected_total, abs=1e-3)


def test_requests_that_go_away_leave_nothing(qwen: Any) -> None:
    """At any time: before, while or after their pictures are encoded, some of which they share."""
    options = {**FEW, "dtype": "bfloat16", "max_num_batched_tokens": 48, "encoder_cache_mib": 1}
    llm = AsyncLLM(str(qwen("qwen3_vl")), **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    rng = random.Random(0)

    async def ask(index: int) -> str:
        pictures = [noise(64, 80, rng.randrange(5)) for _ in range(rng.randint(1, 3))]
        given = {"prompt": PICTURE * len(pictures), "multi_modal_data": {"image": pictures}}
        try:
            async with asyncio.timeout(rng.choice((0.01, 0.1, 0.3, 60))):
                return (await llm.generate(given, params)).outputs[0].text
        except TimeoutError:
            return "gone"

    async def storm() -> list[str]:
        found = await asyncio.gather(*map(ask, range(40)))
        await llm.check_health()  # after all that was sent to the engine's thread
        return found

    ends = asyncio.run(storm())
    assert 0 < ends.count("gone") < len(ends)
    (hook,) = (each for each in llm.engine.scheduler.hooks if isinstance(each, EncoderHook))
    assert not any((hook._parked, hook._pinned, +hook._pins, hook._current))
    llm.shutdown()


@pytest.mark.long
def test_ranks(qwen: Any, make_llm: Make) -> None:
    path = qwen("qwen3_vl")
    expected = answers(make_llm(path, dtype="float32"))
    found = answers(make_llm(path, dtype="float32", tensor_parallel_size=2))
    for (tokens, total), (their_tokens, their_total) in zip(found, expected, strict=True):
        assert tokens == their_tokens
        assert total == pytest.approx(their_total, abs=1e-3)
