"""Grammars: structured_outputs, compiled by llguidance for the model's tokenizer.

Compiling is bounded in time and memory, and compiled grammars are kept.
"""

import contextlib
import functools
import json
import logging
import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from decimal import Decimal, InvalidOperation, Overflow
from typing import TYPE_CHECKING, Any

from nanovllm.errors import InvalidRequestError
from nanovllm.features.structured.grammar_errors import in_our_words, what_is_not_enforced
from nanovllm.features.structured.grammar_limits import (
    LIMITS,
    MANY_PATTERNS,
    check_parts,
    check_terminals,
    num_classes,
    try_grammar,
)
from nanovllm.features.structured.grammar_tokenizer import GrammarTokenizer, grammar_tokenizer
from nanovllm.loading.text_tokenizer import TextTokenizer
from nanovllm.options.json_schema import X_GUIDANCE, grammar_schema_text
from nanovllm.options.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

_WHITE_SPACE = r" |\n[ \t]{0,20}"
"""Between the parts of a JSON text. Bounded, because small models would write no end of it."""
_MAX_CACHE_BYTES = 1 << 27  # of all compiled grammars that are kept, as `_size` estimates them
_MAX_REMAINDERS = 100_000
"""Of the divisors in a schema: their least common multiple, times their number."""
_END_OF_INT64 = 2.0**63  # the least number above what llguidance counts with
_MAX_PATTERNS = 64  # keys of all patternProperties in a schema, of which each is compared with each
_MANY_REFERENCES = 20
_MANY_OBJECTS = 500
"""With more of both in a schema, one may lead to another so deeply that llguidance crashes."""
_FUNCTION = re.compile(r"(?m)^arguments_\d+: (%json .*) // (\".*\")$")
"""A rule of `ToolFormat.grammar`: the schema of a function, and its name."""
_LENIENT = re.compile(r'"lenient"\s*:\s*true')
_Key = tuple[str, str, bool]  # a grammar's form, its text, and whether it disables any white space


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps them, or why they are refused. Thread-safe.

    A pickled copy has the tokenizer's text and an empty cache, and logs nothing.

    Args:
        tokenizer_text: returns a tokenizer.json's text; called once, before the first grammar.
        vocab_size: the width of the model's logits.
        eos_token_ids: tokens that may follow a complete output. Only the first of them follows one
            that nothing else can follow.
    """

    def __init__(
        self,
        tokenizer_text: Callable[[], str],
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        *,
        is_copy: bool = False,
    ) -> None:
        self.eos_token_ids = eos_token_ids
        self._tokenizer_text = tokenizer_text
        self._is_copy = is_copy
        self._vocab_size = vocab_size
        self._tokenizer: tuple[LLTokenizer, GrammarTokenizer] | None = None
        self._compiled: OrderedDict[_Key, LLMatcher | str] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        text = functools.partial(str, self._tokenizer_text())
        made = functools.partial(GrammarCompiler, is_copy=True)
        return made, (text, self._vocab_size, self.eos_token_ids)

    @property
    def mask_bytes(self) -> int:
        """Size of a mask: a bit for each token, from the lowest bit of the first byte."""
        return -(-self._vocab_size // 32) * 4

    def matcher(self, params: StructuredOutputsParams) -> "LLMatcher":
        """Return a new matcher, which has consumed no token.

        Raises:
            InvalidRequestError: as for `compile`.
        """
        return self.compile(params).deep_copy()

    def compile(self, params: StructuredOutputsParams) -> "LLMatcher":
        """Compile a grammar, or find it compiled; return what `matcher` copies.

        Raises:
            InvalidRequestError: llguidance is not installed, or refuses the grammar.
        """
        key = _key(params)
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
        if found is None:
            found = self._compile(params)
            with self._lock:
                self._keep(key, found)
        if isinstance(found, str):
            raise InvalidRequestError(f"{params.source} cannot be used: {found}")
        return found

    def is_compiled(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` only has to find it. Never waits for another thread."""
        return _key(params) in self._compiled

    def _keep(self, key: _Key, found: "LLMatcher | str") -> None:
        """Keep what was compiled, and drop what was not used for longest."""
        if key not in self._compiled:  # else another thread was faster
            self._num_bytes += _size(key, found)
        self._compiled[key] = found
        while self._num_bytes > _MAX_CACHE_BYTES and len(self._compiled) > 1:
            self._num_bytes -= _size(*self._compiled.popitem(last=False))

    def _compile(self, params: StructuredOutputsParams) -> "LLMatcher | str":
        """Return the compiled grammar, or why it is refused, which may take as long."""
        tokenizer, described = self._make_tokenizer()
        try:
            _check_divisors(params.text)
            _check_bounds(params.text)
            needs_trial = _check_patterns(params)
            grammar = _llguidance_grammar(params, described)
            if params.form == "grammar":
                needs_trial |= check_terminals(grammar)
        except ValueError as error:
            return in_our_words(str(error), places=_has_places(params))
        if needs_trial and not self._is_copy:
            size = self._vocab_size
            if found := try_grammar(described.text, size, self.eos_token_ids, grammar):
                return in_our_words(found)
        matcher = self._new_matcher(grammar)
        if described.drops_space and not matcher.is_error():
            space = tokenizer.greedy_tokenize(" ")
            if matcher.validate_tokens(space) == len(space):
                # The text lacks the output's first space, so one stands before the form's own.
                matcher = self._new_matcher(_behind_space(grammar))
        if found := matcher.get_error() or self._first_error(matcher):
            return f"{self._function(params.text)}{in_our_words(found, places=_has_places(params))}"
        told, refused = what_is_not_enforced(matcher.get_grammar_warnings())
        # A user's own x-guidance may ask to leave out what cannot be enforced.
        if refused and not _LENIENT.search(params.text.replace(json.dumps(X_GUIDANCE), "")):
            return f"{self._function(params.text)}{refused}"
        for text in () if self._is_copy else told:
            logger.warning("%s: %s", params.source, text)
        return matcher

    def _function(self, text: str) -> str:
        """Return the name of the first function whose schema is refused, if there are functions."""
        from llguidance import LLMatcher

        for rule in _FUNCTION.finditer(text):
            matcher = self._new_matcher(LLMatcher.grammar_from_lark(f"start: {rule[1]}"))
            if matcher.is_error() or what_is_not_enforced(matcher.get_grammar_warnings())[1]:
                return f"the parameters of {rule[2]}: "
        return ""

    def _first_error(self, matcher: "LLMatcher") -> str:
        """Compute the first mask and one after it, so that copies need not; return why that fails,
        or "". A large object fails only after its brace.
        """
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        for token in self.eos_token_ids:
            mask &= ~(1 << token)
        if mask and not matcher.is_error():
            first = matcher.deep_copy()
            first.try_consume_tokens([(mask & -mask).bit_length() - 1])
            if not first.is_error():
                first.compute_bitmask()
            return first.get_error()
        return matcher.get_error()

    def _new_matcher(self, grammar: str) -> "LLMatcher":
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self._make_tokenizer()[0], grammar, log_level=0, limits=limits)

    def _make_tokenizer(self) -> "tuple[LLTokenizer, GrammarTokenizer]":
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise InvalidRequestError(
                "structured_outputs needs llguidance: "
                "pip install -e '.[structured]' -c constraints.txt"
            ) from None
        with self._lock:
            if self._tokenizer is None:
                text = self._tokenizer_text()
                try:
                    described = grammar_tokenizer(text)
                    eos = list(self.eos_token_ids) or None
                    made = LLTokenizer(described.text, n_vocab=self._vocab_size, eos_token=eos)
                    self._tokenizer = made, described
                except Exception as error:  # whatever it finds strange in a checkpoint
                    raise InvalidRequestError(
                        "structured_outputs cannot be used: llguidance cannot read the model's "
                        f"tokenizer: {error!s:.200}"
                    ) from error
            return self._tokenizer


def grammar_compiler(
    tokenizer: TextTokenizer, eos_token_ids: frozenset[int], vocab_size: int
) -> GrammarCompiler:
    """Return what compiles structured_outputs for `tokenizer`."""
    eos = sorted(eos_token_ids, key=lambda token: (token != tokenizer.eos_token_id, token))
    return GrammarCompiler(tokenizer.backend_tokenizer.to_str, vocab_size, tuple(eos))


def _key(params: StructuredOutputsParams) -> _Key:
    return params.form, params.text, params.disable_any_whitespace


def _size(key: _Key, compiled: "LLMatcher | str") -> int:
    """Return an estimate of the bytes that a compiled grammar takes, or why there is none.

    Measured: 420 bytes for each byte of a schema of many short names, 110 to 240 of others, 560 of
    an expression, and 0.8 MiB for an expression of a few bytes with classes of Unicode.
    """
    num_bytes = len(key[1].encode("utf-8", "surrogatepass"))
    if isinstance(compiled, str):
        return num_bytes + 1024
    return 512 * num_bytes + 8192 * num_classes(key[1]) + (1 << 20)


def _check_divisors(text: str) -> None:
    """Raise ValueError for what llguidance's limits do not cover: it has a state for each remainder
    of `multipleOf`; or for text that is not valid Unicode.
    """
    text.encode()
    divisors = []
    for _, number in _numbers_of("multipleOf", text):
        try:
            _, digits, exponent = Decimal(number).normalize().as_tuple()
        except InvalidOperation:  # llguidance says what is wrong
            continue
        except Overflow:
            raise ValueError(f"multipleOf {number:.40} is too large") from None
        whole = min(len(digits) + max(int(exponent), 0), 20)  # digits of a number before its point
        divisors.append(int("".join(map(str, digits)).ljust(whole, "0")[:20]))
    if len(divisors) * math.lcm(*divisors) > _MAX_REMAINDERS:
        raise ValueError(
            f"multipleOf: the divisors together have over {_MAX_REMAINDERS} remainders"
        )


def _check_bounds(text: str) -> None:
    """Raise ValueError for bounds that llguidance cuts to 64 bits: it would allow other integers,
    or, where all allowed ones are cut to the least, recurse until the process crashes.
    """
    for name, number in _numbers_of("(?:exclusiveM|m)(?:in|ax)imum", text):
        try:
            bound = float(number)
        except ValueError:  # llguidance says what is wrong
            continue
        if (bound if name.lower().endswith("minimum") else -bound) >= _END_OF_INT64:
            raise ValueError(f"{name} {number:.40} is beyond 64 bits, and cannot be enforced")


def _numbers_of(keyword: str, text: str) -> list[tuple[str, str]]:
    """Return each keyword (a regular expression) in a schema that has a number, and its text."""
    plain = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    return re.findall(rf'"({keyword})"\s*:\s*([-+.0-9eE]+)', plain)


def _check_patterns(params: StructuredOutputsParams) -> bool:
    """Raise ValueError for many patternProperties, and expressions of many parts; return whether a
    schema needs a trial: it may be deep, or several expressions meet in a text.
    """
    text = params.text
    num_keys = 0
    patterns: list[str] = []
    counts: Counter[str] = Counter()  # of objects and keywords in one schema
    needs_trial = False

    def note(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        nonlocal num_keys
        counts["objects"] += 1
        for key, value in pairs:
            if key == "patternProperties" and isinstance(value, dict):
                num_keys += len(value)
                patterns.extend(value)
            elif key in ("pattern", "format") and isinstance(value, str):
                patterns.append(value)
            counts["refs"] += key == "$ref"
            counts["all"] += key == "allOf"
            counts["patterns"] += key in ("pattern", "format")
        return dict(pairs)

    starts = {text.find("{", match.end()) for match in re.finditer("%json", text)} - {-1}
    decoder = json.JSONDecoder(object_pairs_hook=note)
    for start in {text.find("{")} if params.form == "json" else starts:
        counts.clear()
        with contextlib.suppress(ValueError, RecursionError):  # llguidance says what is wrong
            decoder.raw_decode(text, start)
        meets = counts["patterns"] > MANY_PATTERNS and counts["refs"] + counts["all"]
        is_deep = counts["refs"] > _MANY_REFERENCES and counts["objects"] > _MANY_OBJECTS
        needs_trial = bool(needs_trial or meets or is_deep)
    if num_keys > _MAX_PATTERNS:
        raise ValueError(f"patternProperties: {num_keys} keys, the limit is {_MAX_PATTERNS}")
    check_parts([text] if params.form == "regex" else patterns)
    return needs_trial


def _llguidance_grammar(params: StructuredOutputsParams, tokenizer: GrammarTokenizer) -> str:
    """Return the grammar in llguidance's own form; raise ValueError if it has no known notation."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if params.form in ("json", "json_object"):
        any_object = '{"type": "object"}'
        schema = any_object if params.form == "json_object" else grammar_schema_text(params.text)
        options: Any = {"lenient": True, "whitespace_pattern": _WHITE_SPACE}
        if params.disable_any_whitespace:
            options = {"lenient": True, "whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(schema, defaults=options)
    if params.form == "regex":
        return LLMatcher.grammar_from_regex(params.text)
    if params.form == "choice":
        assert params.choice is not None
        rules = " | ".join(json.dumps(item, ensure_ascii=False) for item in params.choice)
        return LLMatcher.grammar_from_lark(f"start: {rules}")
    if params.is_lark:
        return LLMatcher.grammar_from_lark(tokenizer.with_mark_ids(params.text))
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(params.text))
    except Exception as error:  # it raises Exception itself
        raise ValueError(f"it has no rule `start` of Lark, and is no GBNF: {error}") from error


def _behind_space(grammar: str) -> str:
    """Return llguidance's grammar of a space and then what `grammar` allows."""
    try:
        (found,) = json.loads(grammar)["grammars"]
    except ValueError:  # Lark
        found = {"lark_grammar": grammar}
    start = {"lark_grammar": 'start: " " @form'}
    return json.dumps({"grammars": [start, {**found, "name": "form"}]})


def _has_places(params: StructuredOutputsParams) -> bool:
    """Whether lines and columns in errors are those of a text that a user has written."""
    return params.is_lark and params.source.startswith("structured_outputs.grammar")
