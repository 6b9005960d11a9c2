"""Answers that were generated mean what was meant, however they arrive.

`FUZZ_EXAMPLES=2000 pytest tests/server/output_parsers/test_generated_answers.py` makes that many
for each family.
"""

import json
import os
import time
from collections.abc import Sequence
from random import Random

import pytest

from nanovllm.apps.server.output_parsers.answer_parser import AnswerParser
from nanovllm.apps.server.output_parsers.harmony import HarmonyParser
from nanovllm.apps.server.output_parsers.muse import MuseParser
from nanovllm.apps.server.output_parsers.parts import (
    PartsReader,
)
from nanovllm.apps.server.output_parsers.reasoning import HARMONY, MUSE, ReasoningParser
from nanovllm.apps.server.output_parsers.tool_formats import TOOL_FORMATS
from tests.server.output_parsers.generated_answers import FAMILIES, Answer, Family, answer
from tests.server.output_parsers.helpers import Split, split

NUM_ANSWERS = int(os.environ.get("FUZZ_EXAMPLES", 4))
EVERY_CUT = 100
"""So many answers of a family are cut at every place; the others at some, as that takes hours."""
SEED = time.time_ns() if "FUZZ_EXAMPLES" in os.environ else 0


def parse(family: Family, given: Answer, pieces: list[str], *, cut: bool = False) -> Split:
    reasoning: PartsReader | None = None
    tools = None
    if family.thought is HARMONY:
        reasoning = HarmonyParser(started=given.started, marked=given.marked)
    elif family.thought is MUSE:
        reasoning = MuseParser(
            started=given.started, marked=given.marked, functions=given.functions
        )
    else:
        tools = TOOL_FORMATS[family.tools].parser(given.marked, given.functions)
        if family.thought is not None:
            reasoning = ReasoningParser(family.thought, started=given.started, marked=given.marked)
    parser = AnswerParser(reasoning, tools, several=True)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish(cut=cut)
    return split(parts)


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_mean_what_was_meant(name: str) -> None:
    family = FAMILIES[name]
    for index in range(NUM_ANSWERS):
        rng = Random(f"{SEED} {name} {index}")
        given = answer(family, rng)
        text = given.text
        found = parse(family, given, [text])
        thoughts, said, calls = found
        context = f"seed {SEED}, answer {index} of {name}: {given}"
        read = [(called, json.dumps(json.loads(arguments))) for called, arguments in calls]
        meant = [(called, json.dumps(arguments)) for called, arguments in given.calls]
        assert (thoughts, said, read) == (given.reasoning, given.said, meant), context
        assert parse(family, given, list(text)) == found, context
        places: Sequence[int] = range(1, len(text))
        if index >= EVERY_CUT:
            places = rng.sample(places, min(9, len(places)))
        for cut in places:
            assert parse(family, given, [text[:cut], text[cut:]]) == found, (cut, context)
        for cut in rng.sample(range(len(text) + 1), min(3, len(text) + 1)):
            whole = parse(family, given, [text[:cut]], cut=True)
            assert parse(family, given, list(text[:cut]), cut=True) == whole, (cut, context)
            if family.has_tag:  # else what is there of a call may be text
                assert given.said.startswith(whole[1].rstrip()), (cut, context)
            if not given.reasoning:  # else a call may be a thought as yet
                for one, other in zip(whole[2], calls, strict=False):
                    assert one[0] == other[0], (cut, context)
                    assert other[1].startswith(one[1]), (cut, context)
                assert len(whole[2]) <= len(calls), (cut, context)
