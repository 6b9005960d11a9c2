"""Encoders and cross-encoders beside transformers: whole prompts in one step, of any batch."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from nanovllm import LLM, PoolingParams
from nanovllm.errors import (
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    UnsupportedModelError,
)
from tests.checkpoints import copy_checkpoint
from tests.encoders import make_encoder
from tests.test_native_invariance import pytestmark as with_c_kernels

OPTIONS: dict[str, Any] = {"device": "cpu", "num_kvcache_blocks": 64}
chooser = random.Random(0)
PROMPTS = [[chooser.randrange(5, 500) for _ in range(n)] for n in (1, 5, 16, 33, 90, 128)]
PADDED = [2, 20, 1, 30, 1, 40, 3]
"""RoBERTa does not count token 1, which a text may have, spelled out."""
QUERY = "What is a KV cache?"
DOCUMENTS = ["It keeps keys and values.", "cats", "a page [SEP] of a pool", ""]

Saved = tuple[PreTrainedModel, Path]


@pytest.fixture(scope="module", params=["bert", "xlm-roberta"])
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    path = tmp_path_factory.mktemp("encoder")
    return make_encoder(path, request.param, hidden_act="gelu"), path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bert")
    make_encoder(path)
    return path


def vectors(llm: LLM, prompts: Any, **params: Any) -> list[list[float]]:
    outputs = llm.embed(prompts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return [output.outputs.embedding for output in outputs]


def test_vectors_equal_those_of_transformers(encoder: Saved, opened: Any) -> None:
    theirs, path = encoder
    llm = opened(path)
    prompts = [*PROMPTS, PADDED]
    with torch.inference_mode():
        states = [theirs(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    for pooling, expected in {
        "mean": [each.mean(0) for each in states],
        "cls": [each[0] for each in states],
        "last": [each[-1] for each in states],
    }.items():
        found = torch.tensor(vectors(llm, prompts, pooling=pooling, normalize=False))
        assert torch.allclose(found, torch.stack(expected), rtol=1e-5, atol=1e-5), pooling
    made = torch.nn.functional.normalize(torch.stack([each.mean(0) for each in states]))
    assert torch.allclose(torch.tensor(vectors(llm, prompts)), made, rtol=1e-5, atol=1e-5)
    alone = torch.tensor(vectors(llm, [PADDED]))
    assert torch.allclose(alone, made[-1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "activation"), [("bert", None), ("xlm-roberta", "Identity")]
)
def test_scores_equal_those_of_transformers(
    model_type: str, activation: str | None, tmp_path: Path, opened: Any
) -> None:
    """A query and a document are tokens of two types."""
    theirs = make_encoder(tmp_path, model_type, pooling=None, num_labels=1)
    path = tmp_path
    if activation is not None:
        nested = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
        path = tmp_path / "copy"
        copy_checkpoint(str(tmp_path), path, sentence_transformers=nested)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = opened(path).score(QUERY, DOCUMENTS, use_tqdm=False)
    for document, output in zip(DOCUMENTS, found, strict=True):
        pair = tokenizer.encode(QUERY, document)
        assert output.prompt_token_ids == pair.ids
        types = {"token_type_ids": torch.tensor([pair.type_ids])} if model_type == "bert" else {}
        with torch.inference_mode():
            (logit,) = theirs(torch.tensor([pair.ids]), **types).logits[0]
        expected = logit if activation else torch.sigmoid(logit)
        assert output.outputs.score == pytest.approx(expected.item(), abs=1e-5)


@with_c_kernels
def test_bits_do_not_depend_on_the_batch(bert: Path, opened: Any) -> None:
    """Few tokens are recorded; a step ends with a prompt, and has no more than was asked for."""
    alone = opened(bert, dtype="bfloat16")
    expected = [vectors(alone, [prompt])[0] for prompt in PROMPTS]
    assert alone.engine.worker_info.arithmetic.batch_invariant
    for options in ({}, {"max_num_batched_tokens": 1}, {"enforce_eager": True}):
        llm = opened(bert, dtype="bfloat16", **options)
        assert vectors(llm, PROMPTS * 3) == expected * 3
        outputs = llm.embed(PROMPTS, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0] * len(PROMPTS)
        steps = llm.engine.stats.step_sizes
        assert max(steps) <= llm.engine.worker_info.max_num_batched_tokens
        assert llm.engine.scheduler.block_manager.num_free_blocks == 64


def test_files_as_they_were_first_published(tmp_path: Path, opened: Any) -> None:
    """With a head in front of them, older names of norms, and masks."""
    from safetensors.torch import load_file, save_file

    theirs = make_encoder(tmp_path)
    expected = vectors(opened(tmp_path), PROMPTS)
    file = tmp_path / "model.safetensors"
    tensors = {
        f"bert.{name.replace('Norm.weight', 'Norm.gamma').replace('Norm.bias', 'Norm.beta')}": value
        for name, value in load_file(file).items()
    }
    more = {"bert.embeddings.position_ids": torch.arange(128)[None], "cls.x": torch.ones(2)}
    assert any("gamma" in name for name in tensors)
    assert theirs.config.model_type == "bert"
    save_file(tensors | more, file)
    assert vectors(opened(tmp_path), PROMPTS) == expected


def test_long_texts(bert: Path, opened: Any) -> None:
    """The last token is the one that the tokenizer puts there."""
    llm = opened(bert)
    text = "paged attention " * 100
    with pytest.raises(InvalidRequestError, match="max_model_len 128 is the most: shorten"):
        llm.embed(text, use_tqdm=False)
    cut = PoolingParams(truncate_prompt_tokens=-1)
    (found,) = llm.embed(text, use_tqdm=False, pooling_params=cut)
    assert len(found.prompt_token_ids) == 128
    assert (found.prompt_token_ids[0], found.prompt_token_ids[-1]) == (2, 3)


def test_long_pairs(tmp_path: Path, opened: Any) -> None:
    make_encoder(tmp_path, pooling=None, num_labels=1)
    llm = opened(tmp_path)
    long = "paged attention " * 100
    with pytest.raises(PromptTooLongError, match="max_model_len 128 is the most"):
        llm.score(QUERY, long, use_tqdm=False)
    for kept, length in ((-1, 128), (5, None)):
        cut = PoolingParams(truncate_prompt_tokens=kept)
        (found,) = llm.score(QUERY, long, use_tqdm=False, pooling_params=cut)
        tokens = found.prompt_token_ids
        assert length in (None, len(tokens))
        assert tokens[-1] == 3
        assert tokens.count(3) == 2
    with pytest.raises(PromptTooLongError):
        llm.score(
            long, "a", use_tqdm=False, pooling_params=PoolingParams(truncate_prompt_tokens=-1)
        )
    with pytest.raises(InvalidRequestError, match="instruction is for rerankers"):
        llm.score("a", "b", instruction="x", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="token 1; this model's last is 0"):
        llm.embed("a", pooling_params=PoolingParams(token_ids=[1]), use_tqdm=False)


def test_what_is_refused(bert: Path, tmp_path: Path, opened: Any) -> None:
    llm = opened(bert)
    with pytest.raises(InvalidRequestError, match="generates nothing: use embed"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="this model has no logits"):
        llm.embed("a", pooling_params=PoolingParams(token_ids=[1]), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="generates nothing: use embed"):
        llm.chat([{"role": "user", "content": "a"}], use_tqdm=False)
    for options in ({"kv_offload_gib": 0.01}, {"speculative_config": {"method": "ngram"}}):
        with pytest.raises(ConfigError, match="no use for drafts and tiers"):
            opened(bert, **options)
    make_encoder(tmp_path, num_labels=3)
    with pytest.raises(UnsupportedModelError, match="3 labels .*only one label"):
        opened(tmp_path)
