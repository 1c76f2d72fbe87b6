"""Text without meaning for the model, so that long contexts do not disturb it."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from demo_training.corpus import Corpus
from demo_training.words import WORDS

ALPHABETS = (
    string.ascii_lowercase,
    string.ascii_letters,
    string.digits,
    string.printable[:94],
    "".join(map(chr, range(0x00E0, 0x0100))),  # Latin letters with accents
    "".join(map(chr, range(0x0430, 0x0450))),  # Cyrillic
    "".join(map(chr, range(0x4E00, 0x4F00))),  # Chinese
    "".join(map(chr, range(0x1F600, 0x1F640))),  # emoji
)


class Filler:
    """Makes sentences, system messages, questions and prose from word lists and the corpus."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.rng = rng
        self.answers = sorted(set(corpus.answers.values()))
        self.words = sorted({w for text in corpus.texts() for w in text.split()})

    def plain_sentence(self) -> str:
        """Returns an everyday English sentence."""
        lists = (WORDS.who, WORDS.does, WORDS.what, WORDS.where)
        return " ".join(self.rng.choice(options) for options in lists) + "."

    def off_topic(self) -> str:
        """Returns a question about something that the corpus does not cover."""
        explain = [f"{opening} {{}}" for opening in WORDS.explain]
        frames: Sequence[str] = WORDS.topic_questions if self.rng.random() < 0.6 else explain
        question = self.rng.choice(frames).format(self.rng.choice(WORDS.topics)).strip()
        if self.rng.random() < 0.5:
            question = question[:1].upper() + question[1:]
        return question + self.rng.choice(("", "?", "?", "."))

    def system_message(self) -> str:
        """Returns a system message, usual or strange."""
        if self.rng.random() < 0.5:
            return self.rng.choice(WORDS.system_messages)
        if self.rng.random() < 0.3:
            return self.prose(self.rng.randint(1, 40))
        manners = " ".join(self.rng.sample(WORDS.manners, self.rng.randint(0, 3)))
        return f"You are {self.rng.choice(WORDS.personas)}. {manners}".strip()

    def gibberish(self, count: int) -> str:
        """Returns words made of random letters or digits."""
        letters = self.rng.choice(ALPHABETS)
        sizes = (self.rng.randint(1, 9) for _ in range(count))
        return " ".join("".join(self.rng.choices(letters, k=size)) for size in sizes)

    def prose(self, words: int) -> str:
        """Returns running text of about this many words, in one of several styles."""
        style = self.rng.choice(("plain", "plain", "answers", "repeat", "salad", "gibberish"))
        if style == "gibberish":
            return self.gibberish(words // 3 + 1)
        if style == "salad":
            return " ".join(self.rng.choices(self.words, k=words))
        if style == "repeat":
            sentence = self.rng.choice((self.plain_sentence(), self.rng.choice(self.answers)))
            return " ".join([sentence] * (words // len(sentence.split()) + 1))
        return self.sentences(words, plain=style == "plain")

    def sentences(self, words: int, *, plain: bool) -> str:
        """Returns plain sentences, or else answers, until there are this many words."""
        sentences: list[str] = []
        while words > 0:
            sentences.append(self.plain_sentence() if plain else self.rng.choice(self.answers))
            words -= len(sentences[-1].split())
        return " ".join(sentences)
