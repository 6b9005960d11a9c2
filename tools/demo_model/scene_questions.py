"""Questions about the pictures of scenes.py, and their answers."""

import random
from typing import NamedTuple

from tools.demo_model.scenes import COLOURS, CORNERS, DIGITS, SHAPES, Scene, Thing

NUMBERS = ("None.", "One.", "Two.", "Three.", "Four.")
ABSENT = "There is none."
BLIND = "I see no picture."
"""The answer to any question without a picture."""


class Question(NamedTuple):
    """A question about a scene, and its answer."""

    asks: str
    text: str
    answer: str


PHRASES: dict[str, tuple[str, ...]] = {
    "what": (
        "What is at the {corner}?",
        "What do you see at the {corner}?",
        "What is in the {corner} corner?",
        "Which object is at the {corner}?",
        "And at the {corner}?",
    ),
    "colour": (
        "What colour is the {thing}?",
        "Which colour is the {thing}?",
        "What is the colour of the {thing}?",
        "Which colour does the {thing} have?",
    ),
    "count": (
        "How many {things} are there?",
        "How many {things} do you see?",
        "How many {things} are in the picture?",
        "Count the {things}.",
    ),
    "digit": (
        "Which digit is shown?",
        "Which digit do you see?",
        "What digit is it?",
        "What number is in the picture?",
        "Which number do you see?",
        "Read the digit.",
    ),
    "where": (
        "Where is the {thing}?",
        "Where do you see the {thing}?",
        "In which corner is the {thing}?",
        "Find the {thing}.",
    ),
    "exists": (
        "Is there {a}?",
        "Do you see {a}?",
        "Can you see {a}?",
        "Is {a} in the picture?",
    ),
    "all": (
        "What do you see?",
        "What is in the picture?",
        "What is in the image?",
        "What is it?",
        "What is this?",
        "Describe the picture.",
        "Describe the image.",
        "What does the picture show?",
    ),
}
"""Ways to ask each kind of question."""
_WEIGHTS = {"where": 4, "count": 2}
"""How often the kinds are asked that take longest to learn; the others once."""


class Questions:
    """Random questions about scenes."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def ask(self, scene: Scene, asks: str | None = None) -> Question:
        """Return a question of the kind `asks`, or of a random one."""
        if asks is None:
            weights = [_WEIGHTS.get(each, 1) for each in PHRASES]
            (asks,) = self.rng.choices(list(PHRASES), weights)
        values, answer = getattr(self, f"_{asks}")(scene)
        text = self.rng.choice(PHRASES[asks]).format(**values)
        return Question(asks, self._typed(text), answer)

    def _typed(self, text: str) -> str:
        """Return the text as people type it."""
        if self.rng.random() < 0.5:
            text = text.replace("colour", "color")
        if self.rng.random() < 0.2:
            text = text.replace("top", "upper").replace("bottom", "lower")
        if self.rng.random() < 0.15:
            text = text.lower()
        return text.rstrip("?.") if self.rng.random() < 0.15 else text

    def _what(self, scene: Scene) -> tuple[dict[str, str], str]:
        corner = self.rng.randrange(len(CORNERS))
        return {"corner": CORNERS[corner]}, _sentence(str(scene[corner] or "nothing"))

    def _colour(self, scene: Scene) -> tuple[dict[str, str], str]:
        corner = self._filled(scene)
        thing = scene[corner]
        assert thing is not None
        named = self._named(thing.kind)
        if len(_corners(scene, thing.kind)) > 1:
            named = f"object at the {CORNERS[corner]}"
        return {"thing": named}, _sentence(thing.colour)

    def _count(self, scene: Scene) -> tuple[dict[str, str], str]:
        corner = self._filled(scene)
        thing = scene[corner]
        assert thing is not None
        choice, objects = self.rng.random(), self.rng.choice(("objects", "things"))
        if choice < 0.25:
            return {"things": objects}, NUMBERS[len(_corners(scene))]
        if choice < 0.5:
            colour = self.rng.choice((thing.colour, thing.colour, *COLOURS))
            return {"things": f"{colour} {objects}"}, NUMBERS[len(_corners(scene, colour=colour))]
        kinds = (thing.kind, thing.kind) if thing.kind in SHAPES else ()
        kind = self.rng.choice((*kinds, *SHAPES))
        plural = "crosses" if kind == "cross" else f"{kind}s"
        return {"things": plural}, NUMBERS[len(_corners(scene, kind))]

    def _digit(self, scene: Scene) -> tuple[dict[str, str], str]:
        found = [thing.kind for thing in scene if thing and thing.kind in DIGITS]
        return {}, f"{found[0]}." if found else ABSENT

    def _where(self, scene: Scene) -> tuple[dict[str, str], str]:
        thing = scene[self._filled(scene)]
        assert thing is not None
        if self.rng.random() < 0.15:
            thing = Thing(self.rng.choice(SHAPES), self.rng.choice(list(COLOURS)))
        elif self.rng.random() < 0.5 and len(found := _corners(scene, thing.kind)) == 1:
            return {"thing": self._named(thing.kind)}, f"At the {CORNERS[found[0]]}."
        found = _corners(scene, *thing)
        if len(found) > 1:
            return self._where(scene)
        answer = f"At the {CORNERS[found[0]]}." if found else ABSENT
        return {"thing": f"{thing.colour} {self._named(thing.kind)}"}, answer

    def _exists(self, scene: Scene) -> tuple[dict[str, str], str]:
        thing = scene[self._filled(scene)]
        assert thing is not None
        if self.rng.random() < 0.5:
            # As often one with the colour or the kind of a thing that is there.
            kind = self.rng.choice((thing.kind, *SHAPES))
            thing = Thing(kind, self.rng.choice((thing.colour, *COLOURS)))
        answer = "Yes." if thing in scene else "No."
        return {"a": str(thing._replace(kind=self._named(thing.kind)))}, answer

    def _all(self, scene: Scene) -> tuple[dict[str, str], str]:
        parts = [f"{thing} at the {CORNERS[c]}" for c, thing in enumerate(scene) if thing]
        text = ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        return {}, _sentence(text)

    def _named(self, kind: str) -> str:
        """Return the kind's name; of a digit also "digit" or "number"."""
        if kind in DIGITS:
            return self.rng.choice(("digit", "number", kind, kind))
        return kind

    def _filled(self, scene: Scene) -> int:
        """Return a corner that is not empty."""
        return self.rng.choice(_corners(scene))


def _corners(scene: Scene, kind: str | None = None, colour: str | None = None) -> list[int]:
    """Return the corners with a thing of the kind and of the colour."""
    return [
        corner
        for corner, thing in enumerate(scene)
        if thing and kind in (None, thing.kind) and colour in (None, thing.colour)
    ]


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
