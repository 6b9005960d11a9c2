"""Questions that the glossary does not answer, from the words in outside.txt."""

import random
from functools import cache
from pathlib import Path

from tools.demo_model.sentences import BEGINNING, SENTENCES, Term, sentence, typed


@cache
def _read_words() -> dict[str, list[str]]:
    lists = {}
    for line in Path(__file__).with_name("outside.txt").read_text(encoding="utf-8").splitlines():
        name, colon, words = line.partition(": ")
        if colon and not line.startswith("#"):
            lists[name] = [word.strip() for word in words.split("; ")]
    return lists


class Outside:
    """Random questions outside the glossary."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.words = _read_words()

    def draw(self) -> str:
        """Return a question that the glossary does not answer."""
        rng = self.rng
        kinds = (
            (self._about_something, 8),
            (self._about_nonsense, 5),
            (self._sum, 2),
            (self._place, 3),
            (self._person, 3),
            (self._deed, 3),
            (self._babble, 1),
            (lambda: rng.choice(self.words["questions"]), 5),
            (self._foreign, 3),
        )
        (make,) = rng.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])
        text = make()
        return typed(rng, text) if rng.random() < 0.7 else text

    def _about_something(self) -> str:
        if self.rng.random() < 0.5:
            words = self.rng.choice(self.words["computing"])
            return sentence(self.rng, Term.parse(words), SENTENCES + BEGINNING)
        term = Term(self.rng.choice(self.words["nouns"]), countable=True)
        if self.rng.random() < 0.2:
            term = term.pluralized()
        return sentence(self.rng, term, SENTENCES + BEGINNING)

    def _about_nonsense(self) -> str:
        """Ask about a made-up word, so that the model need not know which words are outside."""
        words = " ".join(self._word() for _ in range(self.rng.choice([1, 1, 1, 2, 2, 3])))
        term = Term(words, countable=self.rng.random() < 0.5)
        return sentence(self.rng, term, SENTENCES + BEGINNING)

    def _word(self) -> str:
        rng = self.rng
        onsets = "b c d f g h j k l m n p r s t v w y z bl br ch cl cr dr fl fr gl gr kn ph pl pr"
        onsets += " qu sc sh sk sl sm sn sp st str sw th tr tw wh"
        rimes = "a e i o u ab ack ade age ail ain al am an and ap ar ard ark at ate ay ea ed eel en"
        rimes += " ent er est ice id ight in ing ink ion ip ish it o oat ock on oon op or ord ous"
        rimes += " out ow ug ull um un us ust y"
        number = rng.choice([1, 2, 2, 3])
        parts = [rng.choice(onsets.split()) + rng.choice(rimes.split()) for _ in range(number)]
        word = "".join(parts)
        return word.capitalize() if rng.random() < 0.15 else word

    def _sum(self) -> str:
        rng = self.rng
        a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
        sign = rng.choice(
            ["+", "-", "*", "/", "plus", "minus", "times", "divided by", "to the power of"]
        )
        frames = [
            "What is {}?",
            "{}",
            "{}=",
            "{} = ?",
            "Compute {}.",
            "How much is {}?",
            "Solve {}",
        ]
        return rng.choice(frames).format(
            f"{a} {sign} {b}" if rng.random() < 0.8 else f"{a}{sign}{b}"
        )

    def _place(self) -> str:
        place = self.rng.choice(self.words["countries"] + self.words["cities"])
        frames = (
            "What is the capital of {}?",
            "What is the capital of {}?",
            "The capital of {} is",
            "Where is {}?",
            "What is the weather in {}?",
            "How is the weather in {} today?",
            "Will it rain in {} tomorrow?",
            "How many people live in {}?",
            "What language do they speak in {}?",
            "Who is the president of {}?",
            "How do I get to {}?",
            "What should I see in {}?",
            "Have you been to {}?",
            "Tell me about {}.",
            "What is the best restaurant in {}?",
            "What is the currency of {}?",
            "When was {} founded?",
            "What time is it in {}?",
        )
        return self.rng.choice(frames).format(place)

    def _person(self) -> str:
        person = self.rng.choice(self.words["people"])
        if self.rng.random() < 0.3:
            person = f"{self._word()} {self._word()}".title()
        frames = (
            "Who is {}?",
            "Who was {}?",
            "When was {} born?",
            "Where did {} live?",
            "What did {} do?",
            "How old is {}?",
            "Is {} still alive?",
            "Tell me about {}.",
            "Why is {} famous?",
            "Do you know {}?",
            "What do you think of {}?",
            "{} was born in",
            "Write a letter to {}.",
        )
        return self.rng.choice(frames).format(person)

    def _deed(self) -> str:
        deed = self.rng.choice(self.words["deeds"])
        frames = (
            "How do I {}?",
            "How can I {}?",
            "How to {}?",
            "Can you {}?",
            "Could you {} for me?",
            "Please {}.",
            "{}",
            "I want to {}.",
            "Should I {}?",
            "What is the best way to {}?",
            "Help me {}.",
            "Why should I {}?",
            "Write a program to {}.",
        )
        return self.rng.choice(frames).format(deed)

    def _babble(self) -> str:
        rng = self.rng
        kind = rng.randrange(3)
        if kind == 0:
            return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 14)))
        if kind == 1:
            return "".join(rng.choices("0123456789 ?!.#$%&*+-=/()<>[]{}", k=rng.randint(1, 10)))
        words = [rng.choice([self._word(), rng.choice(self.words["nouns"])]) for _ in range(6)]
        return " ".join(words[: rng.randint(2, 6)])

    def _foreign(self) -> str:
        if self.rng.random() < 0.6:
            return self.rng.choice(self.words["foreign"])
        asked = self.rng.choice(self.words["asked abroad"])
        return asked.format(self.rng.choice(self.words["words abroad"]))
