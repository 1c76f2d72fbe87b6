"""Variants of the trained questions, so that the model also answers other wordings."""

from __future__ import annotations

import random
import re

from demo_training.corpus import Corpus, normalise
from demo_training.typist import Typist
from demo_training.words import WORDS

SYNONYM_OF = {
    word: tuple(other for other in group if other != word)
    for group in WORDS.synonyms
    for word in group
}
# The longest word first, so that "do not" is not taken for "do".
SYNONYM_PATTERN = re.compile(
    r"(?<![\w-])("
    + "|".join(sorted(map(re.escape, SYNONYM_OF), key=len, reverse=True))
    + r")(?![\w-])",
    re.IGNORECASE,
)
EXPLAIN_PATTERN = re.compile(
    r"^(what is|what are|explain|describe|define|tell me about|what exactly is)"
    r"( an?| the)? (?P<subject>.+?)( to me| for me| please)?[?.!]*$",
    re.IGNORECASE,
)


class Augmenter:
    """Rewrites questions the way different people would type them; answers never change."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.rng = rng
        self.type = Typist(rng)
        self.answer_of = {normalise(u.turns[0][0]): u.turns[0][1] for u in corpus.questions}
        self.questions_of: dict[str, list[str]] = {}
        for unit in corpus.questions:
            question, answer = unit.turns[0]
            self.questions_of.setdefault(answer, []).append(question)
        self.content_words = {
            answer: content_words(answer)
            for answer in self.questions_of
            if answer != corpus.unknown_answer
        }

    def __call__(self, question: str, answer: str) -> str:
        """Returns a variant of a question that is not a trained question of another answer."""
        variant = self.rewrite(question, answer)
        return variant if self.answer_of.get(normalise(variant), answer) == answer else question

    def rewrite(self, question: str, answer: str) -> str:
        """Applies a random mix of rewrites; about a quarter of all questions stay unchanged."""
        chance = self.rng.random
        if chance() < 0.25:
            return question
        if answer not in self.content_words:
            return self.type(question)
        if chance() < 0.08:
            return self.type(self.keywords(answer))
        if chance() < 0.08:
            question = self.join_two(question, answer)
        if chance() < 0.35:
            question = self.change_opening(question)
        if chance() < 0.5:
            question = self.swap_synonyms(question)
        if chance() < 0.4:
            question = self.drop_words(question)
        if chance() < 0.25:
            question = f"{self.rng.choice(WORDS.prefixes)} {lower_first(question)}"
        if chance() < 0.15:
            question = f"{question.rstrip('?.! ')} {self.rng.choice(WORDS.suffixes)}"
        return self.type(question)

    def keywords(self, answer: str) -> str:
        """Returns a question of a few words of the answer, as from a partial memory."""
        words = self.content_words[answer]
        count = min(len(words), self.rng.randint(3, 6))
        picked = sorted(self.rng.sample(range(len(words)), count))
        return f"{self.rng.choice(WORDS.explain)} {' '.join(words[i] for i in picked)}".strip()

    def join_two(self, question: str, answer: str) -> str:
        """Puts two questions with the same answer, or halves of them, one after the other."""
        other = self.rng.choice(self.questions_of[answer])
        if self.rng.random() < 0.5:
            return f"{question} {other}"
        first, second = question.rstrip("?.!").split(), other.split()
        return " ".join(first[: (len(first) + 1) // 2] + second[len(second) // 2 :])

    def change_opening(self, question: str) -> str:
        """Exchanges one way of asking for an explanation for another one."""
        match = EXPLAIN_PATTERN.match(question)
        if match is None:
            return question
        article = self.rng.choice(("", "", "the ", "a "))
        return f"{self.rng.choice(WORDS.explain)} {article}{match['subject']}".strip()

    def swap_synonyms(self, question: str) -> str:
        """Exchanges about half of the words that have a synonym."""

        def swap(match: re.Match[str]) -> str:
            word = match.group(0)
            return self.rng.choice(SYNONYM_OF[word.lower()]) if self.rng.random() < 0.5 else word

        return SYNONYM_PATTERN.sub(swap, question)

    def drop_words(self, question: str) -> str:
        """Leaves out some stop words, and now and then one other word of a longer question."""
        words = question.split()
        kept = [w for w in words if w.lower() not in WORDS.stop_words or self.rng.random() > 0.35]
        if len(kept) > 4 and self.rng.random() < 0.3:
            kept.pop(self.rng.randrange(len(kept)))
        return " ".join(kept) or question


def content_words(text: str) -> list[str]:
    """Returns the words of a text that carry meaning, in order and without repeats."""
    words = re.findall(r"[A-Za-z0-9_/-]+", text)
    return list(dict.fromkeys(w for w in words if w.lower() not in WORDS.stop_words and len(w) > 2))


def lower_first(text: str) -> str:
    """Lowers the first letter unless the first word is an abbreviation or a name."""
    return text if text[:2].isupper() or text.startswith("Hearth") else text[:1].lower() + text[1:]
