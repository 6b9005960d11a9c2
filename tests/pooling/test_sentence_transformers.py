"""Directories that sentence-transformers itself writes: the same vectors and scores as it makes."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.cross_encoder.modules import LogitScore
from sentence_transformers.sentence_transformer.modules import Dropout, LayerNorm, Pooling
from tokenizers import Tokenizer, normalizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from nanovllm import LLM, PoolingParams, demo_model
from nanovllm.errors import CheckpointError, InvalidRequestError
from tests.checkpoints import SMALL, random_model, read_json, write_json
from tests.encoders import SIZES, make_encoder

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 64}
SIZE = SIZES["hidden_size"]
LONG = "the cache keeps keys and values of each token in blocks of memory " * 3
TEXTS = ["The cache keeps Keys", "a block table", "x", "Keys and values of each token"]
QUERY = "Which blocks keep keys?"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder whose tokenizer knows upper case."""
    path = tmp_path_factory.mktemp("bert")
    make_encoder(path, pooling=None)
    cased(path)
    return path


def cased(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.save(str(path / "tokenizer.json"))


def vectors(llm: LLM, texts: Any, **params: Any) -> np.ndarray:
    outputs = llm.embed(texts, use_tqdm=False, pooling_params=PoolingParams(**params))
    return np.array([output.outputs.embedding for output in outputs])


def edited(path: Path, name: str, **fields: Any) -> None:
    write_json(path / name, {**read_json(path / name), **fields})


MODULES: dict[str, list[Any]] = {
    "dense": [Dense(SIZE, 24), Normalize()],
    "projected": [Dropout(0.5), Dense(SIZE, 24, False, torch.nn.Identity()), LayerNorm(24)],
    "twice": [Normalize(), Dense(SIZE, 24, activation_function=torch.nn.GELU())],
}
FILES: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "plain": ({}, {}),
    "prompts, cut vectors, options": (
        {
            "prompts": {"query": "find: ", "s": "sum: "},
            "default_prompt_name": "s",
            "truncate_dim": 16,
        },
        {"sentence_bert_config.json": {"model_args": {"torch_dtype": "float32"}}},
    ),
    "lower case, cut texts": (
        {},
        {"sentence_bert_config.json": {"do_lower_case": True, "max_seq_length": 16}},
    ),
    "cut by the tokenizer, upper case": (
        {},
        {"tokenizer_config.json": {"model_max_length": 9, "do_lower_case": False}},
    ),
    "cut at the beginning": (
        {},
        {"tokenizer_config.json": {"model_max_length": 9, "truncation_side": "left"}},
    ),
    "accents, old name": (
        {},
        {
            "tokenizer_config.json": {"strip_accents": False, "tokenize_chinese_chars": False},
            "1_Pooling/config.json": {"pooling_mode": "cls", "include_prompt": False},
        },
    ),
}


def saved(
    bert: Path, path: Path, modules: list[Any], options: dict[str, Any]
) -> SentenceTransformer:
    torch.manual_seed(0)
    given = [Transformer(str(bert)), Pooling(SIZE, "mean"), *modules]
    SentenceTransformer(modules=given, device="cpu", **options).save(str(path))
    return SentenceTransformer(str(path), device="cpu")


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, bert: Path, tmp_path: Path, opened: Any) -> None:
    theirs = saved(bert, tmp_path, MODULES[name], {})
    found = vectors(opened(tmp_path), TEXTS)
    assert found == pytest.approx(theirs.encode(TEXTS), abs=1e-5)


@pytest.mark.parametrize("name", FILES)
def test_files(name: str, bert: Path, tmp_path: Path, opened: Any) -> None:
    options, files = FILES[name]
    saved(bert, tmp_path, [Normalize()], options)
    for file, fields in files.items():
        edited(tmp_path, file, **fields)
    theirs = SentenceTransformer(str(tmp_path), device="cpu")
    llm = opened(tmp_path)
    texts = [*TEXTS, LONG, "A Caché 漢字"]
    assert vectors(llm, texts) == pytest.approx(theirs.encode(texts), abs=1e-5)
    scores = [each.outputs.score for each in llm.score(QUERY, texts, use_tqdm=False)]
    expected = theirs.similarity(theirs.encode_query([QUERY]), theirs.encode_document(texts))[0]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)
    cut = vectors(llm, TEXTS, normalize=True)
    assert cut == pytest.approx(theirs.encode(TEXTS, normalize_embeddings=True), abs=1e-5)


def test_a_network_in_a_folder_of_its_own(bert: Path, tmp_path: Path, opened: Any) -> None:
    theirs = saved(bert, tmp_path, [Dense(SIZE, 8)], {})
    expected = theirs.encode(TEXTS)
    (tmp_path / "0_Transformer").mkdir()
    for file in [each for each in tmp_path.iterdir() if each.is_file()]:
        if file.name not in ("modules.json", "config_sentence_transformers.json"):
            shutil.move(file, tmp_path / "0_Transformer" / file.name)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert vectors(opened(tmp_path), TEXTS) == pytest.approx(expected, abs=1e-5)


def test_a_layer_of_another_size_is_refused(bert: Path, tmp_path: Path, opened: Any) -> None:
    saved(bert, tmp_path, [Dense(SIZE, 8)], {})
    edited(tmp_path, "2_Dense/config.json", out_features=9)
    with pytest.raises(CheckpointError, match="2_Dense cannot be used: .*size mismatch"):
        opened(tmp_path)  # it does nothing else, so it does not start


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("bert", {}),
        ("roberta", {"activation_fn": torch.nn.Identity()}),
        ("bert", {"prompts": {"query": "Q: "}, "default_prompt_name": "query"}),
        ("roberta", {"max_length": 32}),
        ("bert", {"max_length": 32, "processor_kwargs": {"truncation_side": "left"}}),
    ],
)
def test_cross_encoders(kind: str, options: dict[str, Any], tmp_path: Path, opened: Any) -> None:
    make_encoder(tmp_path / "made", kind, pooling=None, num_labels=1)
    made = CrossEncoder(str(tmp_path / "made"), device="cpu", **options)
    tmp_path = tmp_path / "saved"
    made.save(str(tmp_path))
    theirs = CrossEncoder(str(tmp_path), device="cpu")
    texts = [*TEXTS, LONG] if "max_length" in options else TEXTS
    for query in (QUERY, LONG) if "max_length" in options else (QUERY,):
        found = opened(tmp_path).score(query, texts, use_tqdm=False)
        expected = theirs.predict([(query, text) for text in texts])
        assert [each.outputs.score for each in found] == pytest.approx(expected.tolist(), abs=1e-5)


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}Relevant? {% endif %}"
)


@pytest.mark.parametrize(("template", "answers"), [(None, (5, 9)), (TEMPLATE, (5, None))])
def test_rerankers_that_generate(
    template: str | None, answers: tuple[int, int | None], tmp_path: Path, opened: Any
) -> None:
    base, path = tmp_path / "base", tmp_path / "saved"
    decoder(base, template)
    options: dict[str, Any] = {}
    if template is not None:
        options["processing_kwargs"] = {"chat_template": {"add_generation_prompt": True}}
    given = Transformer(str(base), transformer_task="text-generation", **options)
    prompts = {"prompts": {"code": "Find the answer. "}, "default_prompt_name": "code"}
    identity = torch.nn.Identity()
    made = CrossEncoder(
        modules=[given, LogitScore(*answers)], device="cpu", activation_fn=identity, **prompts
    )
    made.save(str(path))
    theirs = CrossEncoder(str(path), device="cpu").predict([(QUERY, text) for text in TEXTS])
    llm = opened(path)
    found = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    assert found == pytest.approx(theirs.tolist(), abs=1e-4)
    if template is not None:
        cut = PoolingParams(truncate_prompt_tokens=-1)
        with pytest.raises(
            InvalidRequestError, match=r"data_2\[1\]: the prompt is too long: .* tokens"
        ):
            llm.score(QUERY, ["x", LONG * 40], use_tqdm=False)
        (long,) = llm.score(QUERY, LONG * 40, pooling_params=cut, use_tqdm=False)
        assert llm.get_tokenizer().decode(long.prompt_token_ids).endswith("\nRelevant? ")


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_decoders_with_a_label(template: str | None, tmp_path: Path, opened: Any) -> None:
    """As converted rerankers are saved: a score in place of the head. With a template they render
    messages, though they generate nothing.
    """
    base, path = tmp_path / "base", tmp_path / "saved"
    decoder(base, template, num_labels=1, pad_token_id=0)
    CrossEncoder(str(base), device="cpu").save(str(path))
    model = CrossEncoder(str(path), device="cpu")
    theirs = model.predict([(QUERY, text) for text in TEXTS], batch_size=1)
    llm = opened(path)
    found = [each.outputs.score for each in llm.score(QUERY, TEXTS, use_tqdm=False)]
    assert found == pytest.approx(theirs.tolist(), abs=1e-4)
    with pytest.raises(InvalidRequestError, match="generates nothing"):
        llm.generate("a", use_tqdm=False)


def test_the_question_of_a_decoder_with_a_label(tmp_path: Path, opened: Any) -> None:
    """By the model's name; and with vLLM's overrides the answers of the head are its score."""
    path = tmp_path / "Qwen3-Reranker-seq-cls"
    decoder(path, None, num_labels=1, pad_token_id=0)
    asked = opened(path).score(QUERY, "x", use_tqdm=False)[0].prompt_token_ids
    path = tmp_path / "Qwen3-Reranker"
    decoder(path, None)
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["a", "b"],
        "is_original_qwen3_reranker": True,
    }
    (plain,) = opened(path, hf_overrides={"classifier_from_token": ["a", "b"]}).score(QUERY, "x")
    (found,) = opened(path, hf_overrides=overrides).score(QUERY, "x", use_tqdm=False)
    assert found.outputs.score == plain.outputs.score
    assert found.prompt_token_ids == plain.prompt_token_ids == asked


def test_vectors_by_a_chat_template(tmp_path: Path, opened: Any) -> None:
    base, path = tmp_path / "base", tmp_path / "saved"
    decoder(base, TEMPLATE)
    theirs = SentenceTransformer(str(base), device="cpu", prompts={"query": "Find"})
    theirs.save(str(path))
    assert "message" in read_json(path / "sentence_bert_config.json")["modality_config"]
    llm = opened(path)
    assert vectors(llm, TEXTS) == pytest.approx(theirs.encode(TEXTS), abs=1e-4)
    found = vectors(llm, TEXTS, prompt_name="query")
    assert found == pytest.approx(theirs.encode_query(TEXTS), abs=1e-4)


def test_a_template_without_pairs_is_refused(tmp_path: Path, opened: Any) -> None:
    base, path = tmp_path / "base", tmp_path / "saved"
    decoder(base, TEMPLATE)
    given = Transformer(str(base), transformer_task="text-generation")
    CrossEncoder(modules=[given, LogitScore(5, 9)], device="cpu").save(str(path))
    parts = {"modality_config": {"message": {"method": "forward", "format": "structured"}}}
    was = read_json(path / "sentence_bert_config.json")
    edited(path, "sentence_bert_config.json", **parts)
    llm = opened(path)  # it generates
    for ask in (llm.embed, partial(llm.score, QUERY)):
        with pytest.raises(InvalidRequestError, match="no vectors .*format: .*, got 'structured'"):
            ask(TEXTS, use_tqdm=False)
    assert llm.generate("a", use_tqdm=False)
    write_json(path / "sentence_bert_config.json", was)
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match="leaves out messages of the roles query and"):
        opened(path).score(QUERY, TEXTS, use_tqdm=False)


def decoder(path: Path, template: str | None, **fields: Any) -> None:
    """Save a random decoder with the demo model's tokenizer; with `num_labels`, for scores."""
    source = Path(demo_model.MODEL)
    fields = {**SMALL, "vocab_size": 1024, "max_position_embeddings": 512, **fields}
    kind = AutoModelForSequenceClassification if "num_labels" in fields else AutoModelForCausalLM
    config = AutoConfig.for_model("qwen3", **fields)
    random_model(config, model_class=kind).save_pretrained(path)
    shutil.copy(source / "tokenizer.json", path)
    stored = read_json(source / "tokenizer_config.json")
    stored.pop("chat_template", None)
    write_json(path / "tokenizer_config.json", stored)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
