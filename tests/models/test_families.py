"""Each family beside transformers' own class: logits, greedy tokens, batching, windows, hits."""

import dataclasses

import pytest

from nanovllm import SamplingParams
from nanovllm.scheduler.windows import pages_for
from tests.models.family_cases import CASES, NESTED, make_model
from tests.models.test_decoder import (
    MAX_LENGTH,
    assert_logits_agree,
    assert_tokens_are_greedy,
    random_prompts,
    vocab_size_of,
)


@pytest.fixture(scope="module", params=CASES)
def saved(request, tmp_path_factory):
    """The name of each case, the model of transformers and the directory where it is saved."""
    model, path = make_model(request.param), tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return request.param, model, path


def test_logits_of_all_positions(saved, caplog):
    """What is for pictures is left out, with a line in the log."""
    case, theirs, path = saved
    with caplog.at_level("INFO", logger="nanovllm.checkpoint.loader"):
        assert_logits_agree(theirs, path, case)
    assert ("left out, because" in caplog.text) == (case.split()[0] in NESTED)


def test_greedy_tokens(saved, make_llm):
    """64 tokens behind each of three prompts: batched, in chunks, preempted, and from a hit."""
    case, theirs, path = saved
    prompts = random_prompts(case, vocab_size_of(theirs), [3, 17, 60])
    chunk = 1 if int(case.split()[1]) % 6 == 1 else 24
    options = {"device": "cpu", "max_model_len": MAX_LENGTH, "kvcache_block_size": 16}
    options["max_num_batched_tokens"] = chunk
    llm = make_llm(path, num_kvcache_blocks=200, **options)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert_tokens_are_greedy(theirs, prompts, outputs)

    longer = prompts[2] + outputs[2].token_ids[:40]
    [hit] = llm.generate([longer], dataclasses.replace(params, max_tokens=20), use_tqdm=False)
    assert hit.token_ids == outputs[2].token_ids[40:60]
    assert hit.num_cached_tokens >= 80

    if chunk == 1:  # a step has one row: nothing is preempted
        return
    smallest = pages_for(MAX_LENGTH, 16, llm.engine.worker_info.windows, chunk)
    llm = make_llm(path, num_kvcache_blocks=smallest + 1, **options)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
    assert llm.engine.scheduler.stats.num_preemptions
