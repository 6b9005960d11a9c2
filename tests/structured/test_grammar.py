"""Grammars compiled for the demo model's tokenizer: kept, copied, bounded and refused."""

import json
import pickle
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import StructuredOutputsParams, demo_model
from nanovllm.errors import InvalidRequestError
from nanovllm.features.structured import grammar
from nanovllm.features.structured.grammar import GrammarCompiler
from nanovllm.options.structured_outputs import made_grammar

pytest.importorskip("llguidance")

TOKENIZER = (Path(demo_model.MODEL) / "tokenizer.json").read_text(encoding="utf-8")
VOCAB_SIZE = 1024
EOS = (1021, 1019)
PROPERTIES = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 1}}}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: TOKENIZER, VOCAB_SIZE, EOS)


def accepts(compiler: GrammarCompiler, text: str, **form: Any) -> bool:
    """Return whether a grammar allows `text` as a whole output, one byte a token."""
    matcher = compiler.matcher(StructuredOutputsParams(**form))
    for token in compiler._make_tokenizer()[0].greedy_tokenize(text):
        if matcher.is_stopped() or matcher.try_consume_tokens([token]) != 1:
            return False
    return matcher.is_accepting()


def test_white_space_of_json_is_bounded(compiler: GrammarCompiler) -> None:
    """Symptom: a small model writes spaces until max_tokens."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for text, loose, compact in (
        ('{"a":1}', True, True),
        ('{"a": 1}', True, False),
        ('{\n    "a": 1\n}', True, False),
        ('{\n\t"a": 1\n}', True, False),
        ('{  "a": 1}', False, False),
        ('{\n\n"a": 1}', False, False),
        ("{\n" + 21 * " " + '"a": 1}', False, False),
    ):
        assert accepts(compiler, text, json=schema) is loose
        assert accepts(compiler, text, json=schema, disable_any_whitespace=True) is compact


@pytest.mark.parametrize("items", [["a"], ["a", "ab", "b"], ['q"\\n', "\n", "é", "🌱", "\u2028"]])
def test_choice_is_one_of_the_strings(compiler: GrammarCompiler, items: list[str]) -> None:
    for item in items:
        assert accepts(compiler, item, choice=items)
        assert not accepts(compiler, item + "x", choice=items)


def test_compiled_grammars_are_kept_and_copied(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = StructuredOutputsParams(regex="ab")
    first = compiler.matcher(params)
    monkeypatch.setattr(GrammarCompiler, "_compile", None)  # from now on nothing is compiled
    second = compiler.matcher(StructuredOutputsParams(regex="ab"))
    (token,) = compiler._make_tokenizer()[0].greedy_tokenize("a")
    assert first.try_consume_tokens([token]) == 1
    assert second.try_consume_tokens([token]) == 1
    with pytest.raises(TypeError):
        compiler.matcher(StructuredOutputsParams(regex="ab", disable_any_whitespace=True))


def test_refused_grammar_is_not_compiled_again(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = StructuredOutputsParams(regex="(a")
    with pytest.raises(InvalidRequestError) as first:
        compiler.compile(params)
    monkeypatch.delattr(GrammarCompiler, "_compile")
    with pytest.raises(InvalidRequestError) as second:
        compiler.matcher(params)
    assert str(first.value) == str(second.value)
    assert compiler.is_compiled(params)


def test_compiled_grammars_are_kept_up_to_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: 128 are kept whatever their size, 1.1 GiB of large ones."""
    monkeypatch.setattr(grammar, "_MAX_CACHE_BYTES", 5 << 20)
    compiler = GrammarCompiler(lambda: TOKENIZER, VOCAB_SIZE, EOS)

    def compile_all(*expressions: str) -> list[str]:
        for regex in expressions:
            compiler.compile(StructuredOutputsParams(regex=regex))
        return [text for _, text, _ in compiler._compiled]

    assert compile_all("a", "b", "a", "c", "d") == ["b", "a", "c", "d"]
    assert compile_all("a", "x" * 4096) == ["a", "x" * 4096]
    assert compile_all("y" * 16_384) == ["y" * 16_384]  # the newest is kept, however large
    with pytest.raises(InvalidRequestError):
        compile_all("(")
    assert compile_all("a") == ["(", "a"]
    assert 1 << 20 < compiler._num_bytes < 5 << 20


def test_undeclared_properties_come_only_where_the_schema_has_them(
    compiler: GrammarCompiler,
) -> None:
    """Symptom: a model adds keys until max_tokens."""
    inner = {"type": "object", "properties": {"b": {"const": 1}}}
    schema = {"type": "object", "properties": {"a": inner}}
    assert accepts(compiler, '{"a": {"b": 1}}', json=schema)
    assert not accepts(compiler, '{"a": {"b": 1}, "c": 1}', json=schema)
    assert not accepts(compiler, '{"a": {"b": 1, "c": 1}}', json=json.dumps(schema))
    assert accepts(compiler, '{"c": 1}', json={**schema, "additionalProperties": True})
    assert accepts(compiler, '{"c": 1}', json={"type": "object"})
    assert accepts(compiler, '{"c": 1}', json_object=True)


@pytest.mark.parametrize(
    ("schema", "accepted", "warning"),
    [
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", "oneOf is used as anyOf"),
        (
            {**PROPERTIES, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
            '{"b": 1}',
            "oneOf is used as anyOf",
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1", ""),  # they exclude each other
        ({"items": {"const": 1}, "uniqueItems": True}, "[1, 1]", "uniqueItems is not enforced"),
        ({"items": {"const": 1}, "uniqueItems": False}, "[1, 1]", ""),
        ({"type": "string", "format": "path"}, '"a/b"', ""),
        ({"type": "string", "format": "date"}, '"2024-02-29"', ""),
    ],
)
def test_what_grammars_do_without(
    compiler: GrammarCompiler,
    caplog: pytest.LogCaptureFixture,
    schema: dict[str, Any],
    accepted: str,
    warning: str,
) -> None:
    """Symptom: 39% of the refusals of real schemas are for oneOf; pydantic's Path is refused."""
    params = {"json": schema}
    for _ in range(2):
        assert accepts(compiler, accepted, **params)
    copy = pickle.loads(pickle.dumps(compiler))  # another rank's, which says nothing
    assert (copy.mask_bytes, copy.eos_token_ids) == (compiler.mask_bytes, EOS)
    assert accepts(copy, accepted, **params)
    assert [warning in record.message for record in caplog.records] == [True] * bool(warning)
    if schema.get("format") == "date":
        assert not accepts(compiler, '"2024-02-30"', **params)


def test_a_users_own_leniency_is_kept(compiler: GrammarCompiler) -> None:
    lenient = {"const": 1, "not": {"const": 2}, "x-guidance": {"lenient": True}}
    assert accepts(compiler, "1", json=lenient)
    assert accepts(compiler, "1", grammar=f"start: %json {json.dumps(lenient)}")
    message = (
        'structured_outputs.json \'{"not": {}}\' cannot be used: the keyword "not" of JSON Schema '
        "cannot be enforced: write the schema without"
    )
    with pytest.raises(InvalidRequestError, match=f"^{re.escape(message)}$"):
        compiler.compile(StructuredOutputsParams(json={"not": {}}))


@pytest.mark.parametrize("start", ["start:", "!?start :", "  start[capture]:"])
def test_rules_named_start_in_all_notations_of_lark(compiler: GrammarCompiler, start: str) -> None:
    assert accepts(compiler, "ab", grammar=f'x: "b"\n{start} "a" x')


def test_annotations_count_towards_no_limit(compiler: GrammarCompiler) -> None:
    schema = {"description": "x" * 2**16, "const": 1}
    assert accepts(compiler, "1", json=schema)
    assert accepts(compiler, "1", json=json.dumps(schema))


def test_tokenizer_is_read_once_and_only_when_needed() -> None:
    calls = []
    compiler = GrammarCompiler(lambda: calls.append(0) or TOKENIZER, VOCAB_SIZE, EOS)
    assert calls == []
    for regex in ("a", "b"):
        compiler.compile(StructuredOutputsParams(regex=regex))
    assert calls == [0]


@pytest.mark.parametrize("vocab_size", [1024, 1025, 1057])
def test_mask_has_a_bit_for_each_logit(vocab_size: int) -> None:
    """The logits may be wider than the tokenizer: no such token is ever allowed."""
    compiler = GrammarCompiler(lambda: TOKENIZER, vocab_size, EOS)
    matcher = compiler.matcher(StructuredOutputsParams(regex="(?s:.*)"))
    mask = torch.full((compiler.mask_bytes + 4,), 255, dtype=torch.uint8)
    matcher.unsafe_compute_mask_ptr(mask.data_ptr(), compiler.mask_bytes)
    assert compiler.mask_bytes >= vocab_size / 8
    assert not mask[VOCAB_SIZE // 8 : -4].any()
    assert mask[-4:].tolist() == [255] * 4


@pytest.mark.parametrize(
    ("schema", "is_refused"),
    [
        ('{"multipleOf": 7}', False),
        ('{"multipleOf": 0.01}', False),
        ('{"multipleOf": 25.00}', False),
        ('{"properties": {"multipleOf": {"type": "string"}}}', False),
        ('{"multipleOf": 1e9}', True),
        ('{"multipleOf" : 123456.5}', True),
        ('{"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}', True),
        (r'{"multiple\u004ff": 99999989}', True),
    ],
)
def test_divisors_are_bounded(compiler: GrammarCompiler, schema: str, is_refused: bool) -> None:
    """Symptom: one schema takes minutes and gigabytes, which llguidance's limits do not cover."""
    start = time.monotonic()
    if is_refused:
        with pytest.raises(InvalidRequestError, match="the divisors together have over"):
            compiler.compile(StructuredOutputsParams(json=schema))
    else:
        compiler.compile(StructuredOutputsParams(json=schema))
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "bounds",
    [
        '"minimum": -18446744073709551616, "maximum": -18446744073709551611',
        r'"exclusiveMinimum": -1e30, "exclusiveM\u0061ximum": -9223372036854775807',
        '"minimum": 1000000000000000000000000000000',
    ],
)
def test_bounds_beyond_64_bits_are_refused(compiler: GrammarCompiler, bounds: str) -> None:
    """Symptom: a segmentation fault in llguidance, which ended a server; or a wrong number."""
    with pytest.raises(InvalidRequestError, match="is beyond 64 bits"):
        compiler.compile(StructuredOutputsParams(json=f'{{"type": "integer", {bounds}}}'))
    wide = '{"type": "integer", "minimum": -4611686018427387904, "maximum": 4611686018427387904}'
    compiler.compile(StructuredOutputsParams(json=wide))


@pytest.mark.parametrize("form", ["json", "grammar"])
def test_patterns_of_properties_are_bounded(compiler: GrammarCompiler, form: str) -> None:
    """Symptom: 600 of them take minutes, which llguidance's limits do not cover."""
    for count in (64, 600):
        patterns = {f"^{index}x.*$": {"type": "integer"} for index in range(count)}
        schema = json.dumps({"allOf": [{"type": "object", "patternProperties": patterns}]})
        text = schema if form == "json" else f"start: %json {schema}"
        params = StructuredOutputsParams(**{form: text})
        if count == 64:
            compiler.compile(params)
        else:
            with pytest.raises(InvalidRequestError, match="600 keys, the limit is 64"):
                compiler.compile(params)


MANY = "a?" * 2000
DOUBLED = "\n".join(f"A{i + 1}: A{i} A{i}" for i in range(14))


@pytest.mark.parametrize(
    "form",
    [
        {"regex": "a?" * 32000},
        {"regex": r"\PL" * 20000},
        {"json": {"type": "string", "pattern": r"[\w-]" * 10000}},
        {"json": {"type": "string", "pattern": MANY}},
        {"json": {"type": "object", "patternProperties": {MANY: {}}}},
        {"grammar": f"start: /{MANY}/"},
        {"grammar": 'start: %json {"anyOf": [{"pattern": "' + MANY + '"}]}'},
        {"grammar": f'start: A14 "x:" # a/b "\nA0: "x:"? /b*/ ["c"]\n{DOUBLED}'},
        {"grammar": "start: A1500\nA0: /b/\n" + "\n".join(f"A{i + 1}: A{i}" for i in range(1500))},
    ],
)
def test_parts_that_may_be_empty_are_bounded(
    compiler: GrammarCompiler, form: dict[str, Any]
) -> None:
    """Symptom: minutes and gigabytes in one step of llguidance's lexer, above all its limits."""
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"the limit is 1000: write fewer|too deeply"):
        compiler.compile(StructuredOutputsParams(**form))
    assert time.monotonic() - start < 1


REFERENCES = {f"a{i + 1}": {"items": {"$ref": f"#/$defs/a{i}"}} for i in range(20000)}


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: A\nA: " + " & ".join(f"/.*{i}.*/" for i in range(150)), "more than 1 s"),
        ("start: a3000\n" + "\n".join(f"a{i + 1}: a{i}" for i in range(3000)), "too deeply"),
        (
            "start: %json "
            + json.dumps({"$ref": "#/$defs/a20000", "$defs": {"a0": {}, **REFERENCES}}),
            "too deeply",
        ),
    ],
)
def test_what_may_end_the_process_is_tried_in_another(
    compiler: GrammarCompiler, grammar: str, reason: str
) -> None:
    """Symptom: a request with this grammar ends the server, or is compiled for hours."""
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.compile(made_grammar(grammar, "the tools"))


def test_what_is_kept_is_counted_with_its_large_classes(compiler: GrammarCompiler) -> None:
    """Symptom: 50 MB a grammar for each of 15 that the limit of what is kept lets in."""
    compiler.compile(StructuredOutputsParams(regex=r"\w" * 3900))
    assert compiler._num_bytes > 26e6
    compiler.compile(StructuredOutputsParams(regex="\N{GRINNING FACE}" * 2000))
    assert compiler._num_bytes > 30e6


def test_what_looks_costly_is_compiled(compiler: GrammarCompiler) -> None:
    patterns = [{"type": "string", "pattern": f"^(x|{i})*$"} for i in range(8)]
    assert accepts(compiler, '"xx"', json={"allOf": patterns})
    rules = "\n".join(f"a{i + 1}: a{i}" for i in range(600))
    assert accepts(compiler, "x", grammar=f'start: a600\na0: "x"\n{rules}')
    words = "|".join(f"words?{i}" for i in range(900))
    assert accepts(compiler, "word7", regex=words)
    schema = {f"k{i}": {"type": "string", "pattern": "(ab?c*)?" * 20} for i in range(60)}
    compiler.compile(StructuredOutputsParams(json={"properties": schema}))


KEYWORDS = (
    "type properties required items prefixItems additionalProperties patternProperties allOf anyOf "
    "oneOf not if enum const pattern format minLength minimum multipleOf maxItems uniqueItems "
    "minProperties contains dependentRequired $ref $id $anchor $defs title x-guidance"
)
OF_WRONG_FORM = [None, 5, "(", "#/x", [None], [5], [[]], [{"a": None}], {"a": 5}, {"": {}}]


@pytest.mark.parametrize("form", ["json", "grammar"])
def test_schemas_of_wrong_form_are_refused_in_words(compiler: GrammarCompiler, form: str) -> None:
    """Symptom: TypeError: unhashable type, or decimal.Overflow, and status 500."""
    objects = {"type": "object", "properties": {"a": {}}}
    texts = [
        json.dumps({**base, keyword: value})
        for keyword in KEYWORDS.split()
        for value in OF_WRONG_FORM
        for base in (({}, objects) if form == "json" else (objects,))
    ]
    refused = 0
    for text in [*texts, '{"multipleOf": 1e9999999}', '{"multipleOf": 1e-9999999}']:
        made = made_grammar(f"start: %json {text}", "the tools")
        try:
            compiler.compile(made if form == "grammar" else StructuredOutputsParams(json=text))
        except InvalidRequestError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize("piece", ["\n", '"\\', "/\\", "a", "a[", "a.", "a\t\t"])
def test_the_longest_grammar_without_rules_is_refused_at_once(
    compiler: GrammarCompiler, piece: str
) -> None:
    """Symptom: 65,536 line ends hold up every thread of the process for most of a minute."""
    text = piece * (65000 // len(piece))
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match="has no rule `start` of Lark, and is no GBNF"):
        compiler.compile(StructuredOutputsParams(grammar=text))
    with suppress(InvalidRequestError):
        compiler.compile(StructuredOutputsParams(grammar="start: A\nA: " + text))
    assert time.monotonic() - start < 2


def test_tokenizer_of_another_model_is_refused() -> None:
    compiler = GrammarCompiler(lambda: TOKENIZER, VOCAB_SIZE - 100, ())
    with pytest.raises(InvalidRequestError, match="llguidance cannot read the model's tokenizer"):
        compiler.compile(StructuredOutputsParams(regex="a"))
