"""Regular expressions from files: Python's results, in linear time, and what is refused."""

import random
import re
import time

import pytest

from nanovllm.utils.safe_regex import MAX_LENGTH, SafeRegex

NAMES = [
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.mlp.down_proj",
    "model.layers.3.mlp.experts.17.up_proj",
    "model.visual.blocks.0.attn.qkv",
]
PATTERNS = [
    r".*mlp\.down_proj$",
    "^model.+down_proj",
    r".*self_attn\.(q|k|v|o)_proj$",
    r"model\.layers\.(?:0|1[0-9])\..*",
    r".*experts\.\d+\.(?:gate|up)_proj",
    r".*\.layers\.[^01]\.mlp",
    r".*layers\.\d{2}\..*",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_of_checkpoints(pattern):
    regex = SafeRegex(pattern)
    for name in NAMES:
        assert regex.match(name) == bool(re.match(pattern, name))


def random_pattern(chooser, depth=0):
    kind = chooser.random()
    if depth > 3 or kind < 0.35:
        return chooser.choice(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", "[a-c]", "1", "{", "}"])
    first = random_pattern(chooser, depth + 1)
    if kind < 0.6:
        return first + random_pattern(chooser, depth + 1)
    if kind < 0.72:
        return f"({first}|{random_pattern(chooser, depth + 1)})"
    if kind < 0.92:
        repeats = ["", "*", "+", "?", "{2}", "{1,2}", "*?", "{0,}", "{,2}", "{1}?", "{,}"]
        return f"(?:{first}){chooser.choice(repeats)}"
    return f"^{first}" if kind < 0.96 else f"{first}$"


def test_random_patterns_match_as_in_python():
    chooser = random.Random(0)
    for _ in range(400):
        pattern = random_pattern(chooser)
        regex, expected = SafeRegex(pattern), re.compile(pattern, re.DOTALL)
        for _ in range(5):
            text = "".join(chooser.choices("ab.1{c", k=chooser.randint(0, 7)))
            assert regex.match(text) == bool(expected.match(text)), (pattern, text)


@pytest.mark.parametrize("pattern", ["(?:a?){999}", "(?:a|b|aa|ab){800}b", "(?:.?){999}b"])
def test_counts_do_not_multiply_the_time(pattern):
    """A name of 300 characters took 1.6 s with `((a?){99}b?){350}`, which is longer than that."""
    regex = SafeRegex(pattern)
    start = time.process_time()
    regex.match("a" * 300 + "c")
    assert time.process_time() - start < 0.3


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*x", "(a|a)*b", "(?:a?){60}a{60}b"])
def test_no_exponential_time(pattern):
    """Symptom: Python's re takes longer than the universe."""
    assert not SafeRegex(f"(?:{pattern})$").match("a" * 300 + "c")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "unclosed group"),
        ("a)", "unopened group"),
        ("[a", "not read"),
        ("*a", "repetition operator missing"),
        ("a**", "not read"),
        ("a{2}{3}", "not read"),
        ("a{3,2}", "start must be <= the end"),
        ("[a&&b]", "not read"),
        ("(?!x)a", "'\\(\\?!' is not read"),
        ("(?i)a", "is not read"),
        (r"(a)\1", "not read"),
        ("\\", "not read"),
        ("[z-a]", "invalid character class range"),
        ("x" * (MAX_LENGTH + 1), "characters"),
        ("(" * 500 + ")" * 500, "nest"),
        ("((a{99}){99}){99}", "long, at most 10000"),
        (r"(?:\w{50}){3}", "make it 150.. long"),
        (r"\w?" * 101, "make it 10100 long"),
    ],
    ids=lambda text: text[:10],
)
def test_what_is_refused(pattern, reason):
    with pytest.raises(ValueError, match=reason):
        SafeRegex(pattern)
