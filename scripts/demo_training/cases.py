"""Chats with a known answer, on which a checkpoint is scored."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from demo_training.corpus import Corpus
from demo_training.filler import Filler

Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Case:
    """A list of chat messages and the answer that is expected."""

    messages: Messages
    answer: str

    def chat(self) -> tuple[list[dict[str, str]], None]:
        """Returns the messages, and no tools."""
        return list(self.messages), None


def chat(*contents: str, system: str | None = None) -> Messages:
    """Returns messages that alternate between user and assistant."""
    head = () if system is None else ({"role": "system", "content": system},)
    roles = ("user", "assistant")
    return head + tuple({"role": roles[i % 2], "content": c} for i, c in enumerate(contents))


def question_cases(corpus: Corpus) -> list[Case]:
    """Returns a case for every trained question."""
    return [Case(chat(u.turns[0][0]), u.turns[0][1]) for u in corpus.questions]


def conversation_cases(corpus: Corpus) -> list[Case]:
    """Returns every turn of every conversation, with the turns before it as history."""
    cases = []
    for unit in corpus.conversations:
        flat = [text for turn in unit.turns for text in turn]
        for i in range(0, len(flat), 2):
            cases.append(Case(chat(*flat[: i + 1]), flat[i + 1]))
    return cases


def long_cases(corpus: Corpus, tokenizer: Any, length: int, count: int) -> list[Case]:
    """Returns trained questions after contexts of about ``length`` tokens of three kinds."""
    rng = random.Random(length)
    filler = Filler(corpus, rng)
    cases = []
    for number in range(count):
        question, answer = rng.choice(corpus.questions).turns[0]
        history: list[str] = []
        while sum(len(tokenizer.encode(text)) + 2 for text in history) < length - 200:
            if number % 3 == 0:
                history.extend(rng.choice(corpus.questions).turns[0])
            else:
                history.append(filler.prose(60) if number % 2 else filler.plain_sentence())
        cases.append(Case(long_chat(history, question, kind=number % 3), answer))
    return cases


def long_chat(history: list[str], question: str, kind: int) -> Messages:
    """Puts a context before a question: as turns (0), system message (1) or same message (2)."""
    if kind == 0:
        return chat(*history, question)
    if kind == 1:
        return chat(question, system=" ".join(history))
    return chat(" ".join(history) + f"\n\n{question}")
