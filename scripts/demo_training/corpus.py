"""The question and answer pairs of ``scripts/demo_corpus``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).resolve().parent.parent / "demo_corpus"
TRAINING_FILES = ("serving", "hearth", "using", "systems", "unknown")
HELD_OUT_FILES = ("serving", "hearth", "using", "systems")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Unit:
    """Turns that belong together: one question with its answer, or a short conversation."""

    turns: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Corpus:
    """All training text: single questions, conversations, and the answer to unknown prompts."""

    questions: tuple[Unit, ...]
    conversations: tuple[Unit, ...]
    answers: dict[str, str]  # "file:id" -> answer
    unknown_answer: str

    def texts(self) -> list[str]:
        """Returns every question and every answer once, for the tokenizer."""
        units = self.questions + self.conversations
        return list(dict.fromkeys(text for unit in units for turn in unit.turns for text in turn))


def read_toml(path: Path) -> dict[str, Any]:
    """Reads one corpus file, which must be plain ASCII."""
    return tomllib.loads(path.read_bytes().decode("ascii"))


def normalise(question: str) -> str:
    """Returns a question without case, punctuation and surplus space, to find duplicates."""
    return " ".join(re.findall(r"[a-z0-9_./\[\]-]+", question.lower())).rstrip(".")


def load_corpus(folder: Path) -> Corpus:
    """Reads the training files; a question that appears twice is an error."""
    questions, conversations, answers = [], [], {}
    seen: dict[str, str] = {}
    for name in TRAINING_FILES:
        data = read_toml(folder / f"{name}.toml")
        for pair in data["pair"]:
            key = f"{name}:{pair['id']}"
            assert key not in answers, f"two pairs are named {key}"
            answers[key] = pair["answer"]
            for question in pair["questions"]:
                form = normalise(question) or question
                assert form not in seen, f"{question!r} is in {seen[form]} and in {key}"
                seen[form] = key
                questions.append(Unit(((question, pair["answer"]),)))
        for conversation in data.get("conversation", []):
            conversations.append(Unit(tuple((q, a) for q, a in conversation["turns"])))
    unknown_answer = answers[f"{UNKNOWN}:{UNKNOWN}"]
    return Corpus(tuple(questions), tuple(conversations), answers, unknown_answer)


def load_held_out(folder: Path, corpus: Corpus) -> list[tuple[str, str]]:
    """Reads the held-out paraphrases as (question, answer); none may be a trained question."""
    trained = {normalise(unit.turns[0][0]) for unit in corpus.questions}
    held_out = []
    for name in HELD_OUT_FILES:
        for entry in read_toml(folder / f"held_out_{name}.toml")["paraphrase"]:
            question = entry["question"]
            assert normalise(question) not in trained, f"held-out question is trained: {question!r}"
            held_out.append((question, corpus.answers[f"{name}:{entry['id']}"]))
    return held_out
