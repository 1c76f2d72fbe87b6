"""Rows of training text: dialogue as the chat template writes it, or plain running text."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tokenizers import Tokenizer

from demo_training.augment import Augmenter
from demo_training.chat_format import (
    ASSISTANT,
    BOS,
    CALL,
    CALL_END,
    END,
    SPECIALS,
    SYSTEM,
    TOOL,
    TOOL_SPECIALS,
    USER,
)
from demo_training.corpus import Corpus, Unit
from demo_training.filler import Filler
from demo_training.tokenizer import special_id
from demo_training.tool_dialogues import Exchange, ToolCorpus, ToolDialogues
from demo_training.words import WORDS

QUESTION_WEIGHT = 0.1  # loss weight of question tokens; answer tokens have 1
CALL_WEIGHT = 2.0  # weight of a token of a call
STRANGENESS = 0.35  # the part of the tools' words that are drawn from all words
CONVERSATION_COPIES = 4  # how often a conversation is in the deck, against 1 for a question


class Row:
    """One row under construction: token ids, and the weight of each as a prediction target."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.weights: list[float] = []

    def add(self, ids: Iterable[int], weight: float) -> None:
        """Appends tokens that all carry the same loss weight."""
        before = len(self.ids)
        self.ids.extend(ids)
        self.weights.extend([weight] * (len(self.ids) - before))


class Deck:
    """Deals the units of a corpus in random order, and shuffles again when all are dealt."""

    def __init__(self, corpus: Corpus, rng: random.Random) -> None:
        self.rng = rng
        self.units = corpus.questions + corpus.conversations * CONVERSATION_COPIES
        self.left: list[Unit] = []

    def deal(self) -> Unit:
        """Takes the next unit."""
        if not self.left:
            self.left = list(self.units)
            self.rng.shuffle(self.left)
        return self.left.pop()


class RowWriter:
    """Writes rows that are filled with random turns."""

    def __init__(
        self, corpus: Corpus, tools: ToolCorpus, tokenizer: Tokenizer, rng: random.Random
    ) -> None:
        self.rng = rng
        self.corpus = corpus
        self.dialogues = ToolDialogues(tools, rng, strangeness=STRANGENESS)
        self.tokenizer = tokenizer
        self.augment = Augmenter(corpus, rng)
        self.filler = Filler(corpus, rng)
        self.deck = Deck(corpus, rng)
        self.special = {name: special_id(tokenizer, name) for name in SPECIALS + TOOL_SPECIALS}
        self.answer_ids = {a: self.encode(a) for u in self.deck.units for _, a in u.turns}

    def row(self, length: int) -> Row:
        """Writes a row of more than ``length`` tokens."""
        if self.rng.random() < 0.05:
            return self.plain_text(length)
        row = Row()
        row.add([self.special[BOS]], 0.0)
        self.opening(row, length)
        while len(row.ids) <= length:
            self.unit(row)
        return row

    def tool_row(self, length: int) -> Row:
        """Writes a row of more than ``length`` tokens: tools, and questions for them or not.

        Three of four questions need one of the tools.
        """
        row = Row()
        while len(row.ids) <= length:
            row.add([self.special[BOS]], 0.0)
            tools = self.dialogues.offer(most=1 if length < 200 else 5)
            manners = self.filler.system_message() + "\n" if self.rng.random() < 0.3 else ""
            lines = "\n".join(["Tools:", *(tool.line() for tool in tools)])
            ids = self.encode(manners)[:60] + self.encode(lines)
            self.message(row, SYSTEM, ids, 0.0)
            for _ in range(self.rng.choice((1, 2, 3))):
                choice = self.rng.random()
                if choice < 0.12:
                    self.unit(row)
                else:
                    draw = self.dialogues.missing if choice < 0.25 else self.dialogues.needed
                    self.exchange(row, draw(tools))
        return row

    def copy_row(self, length: int) -> Row:
        """Writes a row of texts without meaning, each of which comes twice."""
        row = Row()
        row.add([self.special[BOS]], 0.0)
        while len(row.ids) <= length:
            texts = [self.nonsense() for _ in range(self.rng.randint(1, 4))]
            for text in texts:
                row.add(text, 0.0)
            self.rng.shuffle(texts)
            for text in texts:
                row.add(text[:2], 0.0)  # tells which of the texts follows
                row.add(text[2:], 1.0)
        return row

    def nonsense(self) -> list[int]:
        """Returns tokens of words, of digits or of any kind."""
        size = self.rng.randint(4, 14)
        choice = self.rng.random()
        if choice < 0.4:
            return self.encode(" ".join(self.rng.choices(self.filler.words, k=size)))[:24]
        if choice < 0.6:
            numbers = (str(self.rng.randint(0, 9999)) for _ in range(size // 2))
            return self.encode(" ".join(numbers))[:24]
        return [self.rng.randrange(len(SPECIALS), 2045) for _ in range(size)]

    def exchange(self, row: Row, exchange: Exchange) -> None:
        """Appends a question, the calls, their results and the answer."""
        self.message(row, USER, self.encode(exchange.question), QUESTION_WEIGHT)
        if exchange.calls:
            row.add([self.special[ASSISTANT]], 0.0)
            for call in exchange.calls:
                row.add(
                    [self.special[CALL], *self.encode(call), self.special[CALL_END]], CALL_WEIGHT
                )
            row.add([self.special[END]], 1.0)
            for result in exchange.results:
                self.message(row, TOOL, self.encode(result), 0.0)
        self.message(row, ASSISTANT, self.encode(exchange.answer), 1.0)

    def plain_text(self, length: int) -> Row:
        """Writes a row of answers as running text, for completions without a chat template.

        Half of the texts begin with the first words of another sentence, so that the model learns
        to return to known sentences.
        """
        row = Row()
        row.add([self.special[BOS]] * self.rng.randint(0, 1), 0.0)
        while len(row.ids) <= length:
            text = " ".join(self.rng.sample(self.filler.answers, k=self.rng.randint(1, 3)))
            if self.rng.random() < 0.5:
                words = self.filler.prose(8).split()
                row.add(self.encode(" ".join(words[: self.rng.randint(1, 8)])), 0.0)
                text = f" {text}"
            row.add([*self.encode(text), self.special[END]], 1.0)
        return row

    def opening(self, row: Row, length: int) -> None:
        """Appends a system message, a prompt with filler, or nothing before the turns."""
        choice, is_long = self.rng.random(), length >= 256
        prose = self.filler.prose(int(length * self.rng.uniform(0.1, 0.7))) if is_long else ""
        if choice < 0.4:
            self.system_opening(row, length, prose)
        elif choice < 0.6 and is_long:
            self.filled_prompt(row, length, prose)

    def system_opening(self, row: Row, length: int, prose: str) -> None:
        """Appends a system message, half of the time with the prose, cut so that turns fit."""
        text = self.filler.system_message() if length >= 64 else WORDS.system_messages[0]
        text = self.rng.choice((text, f"{text} {prose}".strip()))
        self.message(row, SYSTEM, self.encode(text)[: max(40, length - 100)], 0.0)

    def filled_prompt(self, row: Row, length: int, prose: str) -> None:
        """Appends a prompt of the prose, with or without a question at its end, and the answer."""
        if self.rng.random() < 0.2:
            question, answer = "", self.corpus.unknown_answer
        else:
            question, answer = self.rng.choice(self.corpus.questions).turns[0]
            question = self.rng.choice(("\n\n", "\n", " ")) + self.augment(question, answer)
        ids = self.encode(prose)[: length - 100] + self.encode(question)
        self.message(row, USER, ids, 0.0)
        self.message(row, ASSISTANT, self.answer_ids[answer], 1.0)

    def unit(self, row: Row) -> None:
        """Appends the turns of the next unit, or, in 6% of the calls, an off-topic prompt."""
        if self.rng.random() < 0.06:
            gibberish = self.filler.gibberish(self.rng.randint(1, 12))
            off_topic = self.filler.off_topic()
            text = self.rng.choice((gibberish, self.filler.plain_sentence(), off_topic, off_topic))
            self.turn(row, text, self.answer_ids[self.corpus.unknown_answer])
            return
        for question, answer in self.deck.deal().turns:
            self.turn(row, self.augment(question, answer), self.answer_ids[answer])

    def turn(self, row: Row, question: str, answer_ids: list[int]) -> None:
        """Appends a question and its answer."""
        self.message(row, USER, self.encode(question.strip()), QUESTION_WEIGHT)
        self.message(row, ASSISTANT, answer_ids, 1.0)

    def message(self, row: Row, role: str, ids: list[int], weight: float) -> None:
        """Appends one message as the chat template writes it."""
        row.add([self.special[role]], 0.0)
        row.add([*ids, self.special[END]], weight)

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of ordinary text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids
