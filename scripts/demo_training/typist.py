"""Variants of typing: case, punctuation, and occasional mistakes."""

from __future__ import annotations

import random
import re
import string


class Typist:
    """Varies a question as different people would type it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def __call__(self, question: str) -> str:
        """Varies case and punctuation, and makes one typing mistake in every eighth question."""
        chance = self.rng.random
        if chance() < 0.12:
            question = self.mistake(question)
        if chance() < 0.45:
            question = question.lower()
        elif chance() < 0.06:
            question = question.upper()
        elif chance() < 0.4:
            question = question[:1].upper() + question[1:]
        if chance() < 0.5:
            question = question.rstrip("?.! ") + self.rng.choice(("", "", "?", "?", "?", ".", "!"))
        return question

    def mistake(self, text: str) -> str:
        """Drop, double, swap or replace one letter of a word with at least four letters."""
        places = [m.start() + self.rng.randrange(1, 3) for m in re.finditer(r"[A-Za-z]{4,}", text)]
        if not places:
            return text
        i = self.rng.choice(places)
        edits = (
            text[:i] + text[i + 1 :],
            text[:i] + text[i] + text[i:],
            text[:i] + text[i + 1] + text[i] + text[i + 2 :],
            text[:i] + self.rng.choice(string.ascii_lowercase) + text[i + 1 :],
        )
        return self.rng.choice(edits)
