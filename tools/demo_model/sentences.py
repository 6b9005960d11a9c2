"""Sentences around a term, and how people type them."""

import dataclasses
import random

# A noun phrase with its article stands for {x}, the right form of "to be" for {is}, and so on.
SENTENCES = (
    "What {is} {x}?",
    "What {is} {x}?",
    "What {is} {x}?",
    "What's {x}?",
    "Whats {x}?",
    "What exactly {is} {x}?",
    "So what {is} {x}?",
    "And what {is} {x}?",
    "What {do} {x} mean?",
    "What {do} {x} mean?",
    "What {do} {x} do?",
    "What {do} {x} mean in LLM inference?",
    "What {is} {x} in LLM inference?",
    "What {is} {x} used for?",
    "What {is} {x} good for?",
    "What is meant by {x}?",
    "What is the meaning of {x}?",
    "What is the purpose of {x}?",
    "What do you mean by {x}?",
    "What do you know about {x}?",
    "What can you tell me about {x}?",
    "What about {x}?",
    "How {do} {x} work?",
    "How {do} {x} work?",
    "How would you explain {x}?",
    "How would you describe {x}?",
    "Why {x}?",
    "Why {is} {x} useful?",
    "Why {is} {x} important?",
    "Why do we need {x}?",
    "Why use {x}?",
    "When {is} {x} used?",
    "Explain {x}.",
    "Explain {x}.",
    "Explain {x} to me.",
    "Explain what {x} {is}.",
    "Explain how {x} {work}.",
    "Explain {x} in simple terms.",
    "Explain {x} in one sentence.",
    "Explain {x} like I'm five.",
    "Please explain {x}.",
    "Can you explain {x}?",
    "Can you explain {x} to me?",
    "Could you explain what {x} {is}?",
    "Can you tell me what {x} {is}?",
    "Can you describe {x}?",
    "Do you know what {x} {is}?",
    "Do you know {x}?",
    "Define {x}.",
    "Define {x}.",
    "Definition of {x}",
    "Give me a definition of {x}.",
    "Give a short description of {x}.",
    "Describe {x}.",
    "Describe {x} briefly.",
    "Tell me about {x}.",
    "Tell me about {x}.",
    "Tell me what {x} {is}.",
    "Tell me more about {x}.",
    "Teach me {x}.",
    "Would you tell me about {x}?",
    "Could you describe {x}?",
    "I would like to understand {x}.",
    "I'm trying to understand {x}.",
    "Let me know what {x} {is}.",
    "Please define {x}.",
    "Please tell me what {x} {is}.",
    "Someone mentioned {x}.",
    "Give me a summary of {x}.",
    "Is {x} important?",
    "What would {x} be?",
    "Say something about {x}.",
    "I want to know what {x} {is}.",
    "I want to learn about {x}.",
    "I do not understand {x}.",
    "I don't know what {x} {is}.",
    "I have a question about {x}.",
    "Meaning of {x}",
    "{x} meaning",
    "{x} explained",
    "{x} definition",
    "{x}, please",
    "{x} {mean}",
    "The term {x} means",
    *("{x}?", "{x}") * 9,
)
BEGINNING = ("{x} {is}",)
"""A plain text continues after this; in a chat it is a question."""

OPENINGS = (
    "Hi,",
    "Hello!",
    "hey,",
    "ok,",
    "please:",
    "Question:",
    "Now",
    "and",
    "I wonder:",
    "So,",
    "Well,",
    "Quick question:",
    "Could you help me?",
    "I am new here.",
    "For my exam:",
    "One more:",
)
ENDINGS = (
    "Thanks!",
    "please",
    "Please.",
    "in short",
    "Be brief.",
    "in detail",
    "exactly",
    "again",
    "to a beginner",
    "in vLLM",
    "for me",
    "in your own words",
    "I forgot it.",
)


@dataclasses.dataclass(frozen=True)
class Term:
    """A name of an entry: "a block table" can be counted, "logits" is plural, or neither."""

    noun: str
    countable: bool = False
    plural: bool = False

    @classmethod
    def parse(cls, name: str) -> "Term":
        article, _, noun = name.partition(" ")
        if article in ("a", "an", "the"):
            return cls(noun, countable=True)
        return cls(name.removesuffix("*"), plural=name.endswith("*"))

    def forms(self) -> dict[str, str]:
        """Return the values of a sentence's placeholders except {x}."""
        words = "are do work mean" if self.plural else "is does works means"
        return dict(zip(("is", "do", "work", "mean"), words.split(), strict=True))

    def pluralized(self) -> "Term":
        last = self.noun[-1]
        if last == "y" and self.noun[-2] not in "aeiou":
            return Term(self.noun[:-1] + "ies", plural=True)
        return Term(self.noun + ("es" if last in "shx" else "s"), plural=True)


def article(noun: str) -> str:
    return "an" if noun[0].lower() in "aeiou" or noun.startswith(("FP8", "LRU", "MoE")) else "a"


def sentence(rng: random.Random, term: Term, sentences: tuple[str, ...] = SENTENCES) -> str:
    """Return a sentence about the term, with an article that may be missing or wrong."""
    articles = ["", "", "", "the"]
    if term.countable:
        articles = [article(term.noun), article(term.noun), "the", "the", ""]
    elif not term.plural:
        articles += ["", article(term.noun)]
    phrase = f"{rng.choice(articles)} {term.noun}".strip()
    text = rng.choice(sentences).format(x=phrase, **term.forms())
    return text[0].upper() + text[1:] if rng.random() < 0.8 else text


def typed(rng: random.Random, text: str) -> str:
    """Return the text as someone might type it: case, punctuation and typing errors vary."""
    case = rng.random()
    if case < 0.3:
        text = text.lower()
    elif case < 0.5:
        text = text.upper()
    elif case < 0.53:
        text = text.title()
    end = rng.random()
    if end < 0.35:
        text = text.rstrip("?!.") or text
    elif end < 0.45:
        text = (text.rstrip("?!.") or text) + rng.choice(["?", "?", ".", "!", "??", " ?", "..."])
    if rng.random() < 0.12:
        text = f"{rng.choice(OPENINGS)} {text}"
    if rng.random() < 0.12:
        text += f" {rng.choice(ENDINGS)}"
    return _misspelt(rng, text) if rng.random() < 0.06 else text


def _misspelt(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text))
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1 :] or text
    if kind == 1:
        return text[:at] + text[at] + text[at:]
    return text[:at] + text[at + 1 : at + 2] + text[at] + text[at + 2 :]
