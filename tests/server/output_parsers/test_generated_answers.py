"""Answers that were generated mean what was meant, however they arrive; so do broken ones.

`FUZZ_EXAMPLES=2000 pytest tests/server/output_parsers/test_generated_answers.py` makes that many
for each family.
"""

import json
import os
import re
import time
from random import Random

import pytest

from nanovllm.apps.server.output_parsers.answer_parser import AnswerParser
from nanovllm.apps.server.output_parsers.channels import HarmonyParser, MuseParser
from nanovllm.apps.server.output_parsers.parts import PartsReader
from nanovllm.apps.server.output_parsers.reasoning import HARMONY, MUSE, ReasoningParser
from nanovllm.options.sampling_params import TOKEN_MARK
from tests.server.output_parsers.generated_answers import FAMILIES, Answer, answer, tool_tags
from tests.server.output_parsers.helpers import Split, make_parser, split

NUM_ANSWERS = int(os.environ.get("FUZZ_EXAMPLES", 4))
NUM_CUTS = 100 if "FUZZ_EXAMPLES" in os.environ else 12
SEED = time.time_ns() if "FUZZ_EXAMPLES" in os.environ else 0
NOISE = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "</", "<|", "|>", "```", "json", "{}"),
    *('{"name": "f", "arguments": {', '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "="),
    *("f", "1", "é🌧", "null", "None", "\n", " ", ";", "assistant", " to=f", "thought"),
    *("analysis", "final", "commentary", "{1, 2}", "('x')", "</parameter>", "call:f{", "?"),
)


def parse(name: str, given: Answer, pieces: list[str], *, cut: bool = False) -> Split:
    family = FAMILIES[name]
    reasoning: PartsReader | None = None
    tools = None
    options = {"started": given.started, "marked": given.marked}
    if family.thought is HARMONY:
        reasoning = HarmonyParser(**options)
    elif family.thought is MUSE:
        reasoning = MuseParser(functions=given.functions, **options)
    else:
        tools = make_parser(name, given.functions, marked=given.marked)
        if family.thought is not None:
            reasoning = ReasoningParser(family.thought, **options)
    parser = AnswerParser(reasoning, tools, several=True)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish(cut=cut)
    return split(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_mean_what_was_meant(name: str) -> None:
    family = FAMILIES[name]
    for index in range(NUM_ANSWERS):
        rng = Random(f"{SEED} {name} {index}")
        given = answer(name, rng)
        text = given.text
        found = parse(name, given, [text])
        thoughts, said, calls = found
        context = f"seed {SEED}, answer {index} of {name}: {given}"
        read = [(called, json.dumps(json.loads(arguments))) for called, arguments in calls]
        meant = [(called, json.dumps(arguments)) for called, arguments in given.calls]
        assert (thoughts, said, read) == (given.reasoning, given.said, meant), context
        assert parse(name, given, list(text)) == found, context
        for cut in rng.sample(range(len(text)), min(NUM_CUTS, len(text))):
            assert parse(name, given, [text[:cut], text[cut:]]) == found, (cut, context)
        for cut in rng.sample(range(len(text) + 1), min(3, len(text) + 1)):
            whole = parse(name, given, [text[:cut]], cut=True)
            assert parse(name, given, list(text[:cut]), cut=True) == whole, (cut, context)
            if family.has_tag:  # else what is there of a call may be text
                assert given.said.startswith(whole[1].rstrip()), (cut, context)
            if not given.reasoning:  # else a call may be a thought as yet
                for one, other in zip(whole[2], calls, strict=False):
                    assert one[0] == other[0], (cut, context)
                    assert other[1].startswith(one[1]), (cut, context)
                assert len(whole[2]) <= len(calls), (cut, context)


def broken(name: str, given: Answer, rng: Random) -> str:
    """Return the text of an answer with some pieces lost, repeated, or replaced by noise."""
    text = given.text
    thought = FAMILIES[name].thought
    tags = [*filter(None, tool_tags(name)), *(thought[:2] if thought else ())]
    for _ in range(rng.randrange(1, 5)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 0, 1, 2, 5, 20)))
        piece = rng.choice(("", text[start:end] * 2, rng.choice((*NOISE, *tags * 3))))
        text = text[:start] + piece + text[end:]
    marked = "|".join(map(re.escape, given.marked)) or "$."
    return re.sub(f"{TOKEN_MARK}(?!{marked})", "", text)  # a mark is always before a tag


@pytest.mark.parametrize("name", FAMILIES)
def test_any_cut_of_a_broken_answer_gives_the_same(name: str) -> None:
    for index in range(4 * NUM_ANSWERS):
        rng = Random(f"{SEED} broken {name} {index}")
        given = answer(name, rng)
        text = broken(name, given, rng)
        cut = rng.random() < 0.5
        context = f"seed {SEED}, answer {index} of {name}: {given._replace(text=text)}, cut: {cut}"
        found = parse(name, given, [text], cut=cut)
        one, other = sorted(rng.choices(range(len(text) + 1), k=2))
        for pieces in (list(text), [text[:one], text[one:other], text[other:]]):
            assert parse(name, given, pieces, cut=cut) == found, context
