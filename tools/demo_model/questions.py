"""The questions that the demo model is trained on, for the glossary's entries and outside them.

terms.txt names each entry's terms.
"""

import dataclasses
import random
from functools import cache
from pathlib import Path

from nanovllm.demo_model import OUTSIDE, entries
from tools.demo_model.outside import Outside
from tools.demo_model.sentences import BEGINNING, Term, sentence, typed

_HERE = Path(__file__).resolve().parent

ABOUT = 7
"""The first entries are about the model itself. They have whole questions in place of terms."""

Question = tuple[str, str, str]
"""A question, its answer in a chat, and how a plain text goes on."""


@dataclasses.dataclass(frozen=True)
class Topic:
    """An entry of the glossary, and the other ways to ask for it."""

    question: str
    answer: str
    terms: tuple[Term, ...]
    questions: tuple[str, ...]
    continuation: str
    """What follows "X is" in a plain text, with X the first term."""

    def continued(self, term: Term) -> str:
        same_number = bool(self.terms) and term.plural == self.terms[0].plural
        return self.continuation if same_number else f"explained in my glossary: {self.answer}"


def _continuation(answer: str, rule: str) -> str:
    """Return the answer as the end of a sentence; `rule` is the third column of terms.txt."""
    if not rule:
        return f"explained in my glossary: {answer}"
    number, *start = rule.split()
    words = answer.split()[int(number) :]
    if number == "0":
        words[0] = words[0][0].lower() + words[0][1:]
    return " ".join(start + words)


@cache
def topics() -> tuple[Topic, ...]:
    """Return the entries of the glossary with the names in terms.txt.

    Raises:
        ValueError: terms.txt has other entries than the glossary, or gives a name to two of them.
    """
    found: list[Topic] = []
    answers = dict(entries())
    owners: dict[str, str] = {}
    for line in (_HERE / "terms.txt").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        question, names, *rest = (part.strip() for part in line.split("|"))
        rule = rest[0] if rest else ""
        listed = [name.strip() for name in names.split(";") if name.strip()]
        whole = [n for n in listed if n[-1] in "?!." or len(found) < ABOUT]
        terms = [Term.parse(name) for name in listed if name not in whole]
        for name in {question, *whole, *(term.noun for term in terms)}:
            if owners.setdefault(name.lower(), question) != question:
                raise ValueError(f"terms.txt: {name!r} stands for two entries")
        answer = answers[question]
        continuation = _continuation(answer, rule)
        found.append(Topic(question, answer, tuple(terms), tuple(whole), continuation))
    if [topic.question for topic in found] != list(answers):
        raise ValueError("terms.txt does not have the glossary's entries in their order")
    return tuple(found)


class Questions:
    """Random questions about the glossary and outside it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.topics = topics()
        self.outside = Outside(rng)

    def draw(self) -> Question:
        """Return a question of any kind; a seventh are the glossary's own."""
        kind = self.rng.random()
        if kind < 0.2:
            question = self.outside.draw()
            return question, OUTSIDE, OUTSIDE
        if kind < 0.35:
            topic = self.rng.choice(self.topics)
            return topic.question, topic.answer, topic.answer
        # Those about the model have no terms, so each of their questions must be seen more often.
        about = self.rng.random() < 0.15
        return self.variant(self.rng.choice(self.topics[:ABOUT] if about else self.topics))

    def variant(self, topic: Topic) -> Question:
        """Return another way to ask for an entry."""
        rng = self.rng
        if not topic.terms or rng.random() < 0.25:
            own = [topic.question] * 5
            question = typed(rng, rng.choice([*own, *topic.questions]))
            return question, topic.answer, topic.answer
        if rng.random() < 0.1:
            return self.beginning(topic)
        question = typed(self.rng, sentence(self.rng, self._term(topic)))
        return question, topic.answer, topic.answer

    def beginning(self, topic: Topic) -> Question:
        """Return the beginning of a definition of one of the entry's terms."""
        term = self._term(topic)
        question = sentence(self.rng, term, BEGINNING)
        if self.rng.random() < 0.3:
            question = question.lower()
        return question, topic.answer, topic.continued(term)

    def _term(self, topic: Topic) -> Term:
        rng = self.rng
        term = topic.terms[0] if rng.random() < 0.5 else rng.choice(topic.terms)
        return term.pluralized() if term.countable and rng.random() < 0.15 else term
