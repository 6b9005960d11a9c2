"""Whole models of each family on two ranks. Takes minutes: FAMILY_CASES=12 runs it."""

import pytest

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError
from tests.helpers import token_ids
from tests.models import comparison, family_cases, test_decoder, test_hybrids

MAKERS = {
    case: module.make_model
    for module in (test_decoder, test_hybrids, family_cases)
    for case in module.CASES
}
FAMILIES = sorted({case.split()[0] for case in MAKERS})


def on_two_ranks(make_llm, path, options):
    """Return an LLM on two ranks; None: two do not divide the model's sizes."""
    try:
        return make_llm(path, tensor_parallel_size=2, **options)
    except ConfigError as error:
        if "does not divide" in str(error):
            return None
        raise


@pytest.mark.skipif(comparison.FEW, reason="takes minutes; FAMILY_CASES=12 runs it")
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_give_the_tokens_of_one(family, make_llm, tmp_path):
    """Of the first configuration whose sizes two ranks can share."""
    prompts = comparison.random_prompts(family, 500, [3, 17, 60])
    options = {"device": "cpu", "max_model_len": comparison.MAX_LENGTH, "dtype": "float32"}
    options |= {"kvcache_block_size": 16, "max_num_batched_tokens": 24, "num_kvcache_blocks": 200}
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    for case in [case for case in MAKERS if case.split()[0] == family]:
        path = tmp_path / case
        MAKERS[case](case).save_pretrained(path)
        if (ranks := on_two_ranks(make_llm, path, options)) is not None:
            break
    found = ranks.generate(prompts, params, use_tqdm=False)
    alone = make_llm(path, **options).generate(prompts, params, use_tqdm=False)
    assert token_ids(found) == token_ids(alone)
