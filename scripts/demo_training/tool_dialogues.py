"""Dialogues with tools, made from the wordings and values of ``scripts/demo_corpus/tools.toml``."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from demo_training.words import WORDS

Values = dict[str, str]
STRANGE_WORDS = sorted(
    {w for text in (*WORDS.topics, *WORDS.what) for w in text.split() if w.isalpha()}
)
WORDING = re.compile(r"\(([^()]*)\)")
SLOT = re.compile(r"\{(\w+?)(2?)\}")


class ToolKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool: its names and descriptions, and the wordings of questions, results and answers."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: dict[str, str]  # name -> type of JSON schema
    questions: tuple[str, ...]
    results: tuple[str, ...]
    answers: tuple[str, ...]
    arguments: dict[str, str] = {}  # name -> text with slots; by default the slot of that name


class ToolCorpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``tools.toml``."""

    cannot: str
    values: dict[str, tuple[str | int, ...]]  # words, or the bounds of a range
    tool: tuple[ToolKind, ...]


def load_tools(folder: Path) -> ToolCorpus:
    """Reads the wordings of the tools."""
    return msgspec.toml.decode((folder / "tools.toml").read_bytes(), type=ToolCorpus)


@dataclass(frozen=True)
class OfferedTool:
    """A tool under one of its names, as a request offers it."""

    kind: ToolKind
    name: str
    description: str

    def line(self) -> str:
        """Returns the line that the chat template writes for the tool."""
        content = {
            "name": self.name,
            "description": self.description,
            "parameters": self.kind.parameters,
        }
        return json.dumps(content)


@dataclass(frozen=True)
class Exchange:
    """A question, its calls as JSON, their results, and the answer in words."""

    question: str
    calls: tuple[str, ...]
    results: tuple[str, ...]
    answer: str


class ToolDialogues:
    """Draws tools that a request offers, and questions that need one of them or none.

    `strangeness`: the part of the values, and of some names, that are any words, so that a model
    has to read them in its prompt.
    """

    def __init__(self, corpus: ToolCorpus, rng: random.Random, *, strangeness: float = 0.0) -> None:
        self.corpus = corpus
        self.rng = rng
        self.strangeness = strangeness

    def offer(self, most: int = 5) -> list[OfferedTool]:
        """Returns at most `most` tools in random order: four of them most of the time."""
        count = min(most, self.rng.choices((1, 2, 3, 4, 5), weights=(1, 1, 1, 6, 1))[0])
        return [self.offered(kind) for kind in self.rng.sample(self.corpus.tool, count)]

    def offered(self, kind: ToolKind) -> OfferedTool:
        """Returns a tool under its first name half of the time, else under any."""
        name = kind.names[0] if self.rng.random() < 0.5 else self.rng.choice(kind.names)
        if self.rng.random() < self.strangeness / 2:
            name = f"{name}_{self.rng.choice(STRANGE_WORDS)}"
        return OfferedTool(kind, name, self.rng.choice(kind.descriptions))

    def needed(self, tools: list[OfferedTool]) -> Exchange:
        """Returns a question that one of the tools answers."""
        tool = self.rng.choice(tools)
        wording = self.rng.choice(tool.kind.questions)
        values = self.draw(wording + " ".join(tool.kind.arguments.values()))
        both = [{k: v for k, v in values.items() if not k.endswith("2")}]
        if any(key.endswith("2") for key in values):
            both.append(both[0] | {k[:-1]: v for k, v in values.items() if k.endswith("2")})
        outcomes = [self.outcome(tool.kind, one) for one in both]
        return Exchange(
            question=self.question(wording, values),
            calls=tuple(call_json(tool.name, arguments(tool.kind, one)) for one in both),
            results=tuple(result for result, _ in outcomes),
            answer=" ".join(answer for _, answer in outcomes),
        )

    def missing(self, tools: list[OfferedTool]) -> Exchange:
        """Returns a question that needs a tool which is not among these."""
        offered = [tool.kind for tool in tools]
        kind = self.rng.choice([kind for kind in self.corpus.tool if kind not in offered])
        wording = self.rng.choice(kind.questions)
        return Exchange(self.question(wording, self.draw(wording)), (), (), self.corpus.cannot)

    def draw(self, text: str) -> Values:
        """Draws a value for each slot of a text; an entry "said=written" stays in one piece."""
        values: Values = {}
        for match in SLOT.finditer(text):
            options = self.corpus.values[match[1]]
            left = [o for o in options if o not in values.values()] or list(options)
            low, high = options[0], options[-1]
            if isinstance(low, int) and isinstance(high, int):
                values[match[1] + match[2]] = str(self.rng.randint(low, high))
            elif match[1] + match[2] not in values:
                is_strange = self.rng.random() < self.strangeness
                values[match[1] + match[2]] = (
                    self.strange_value() if is_strange else str(self.rng.choice(left))
                )
        return values

    def strange_value(self) -> str:
        """Returns one or two words of any kind, or a name of random syllables."""
        if self.rng.random() < 0.5:
            return " ".join(self.rng.sample(STRANGE_WORDS, self.rng.randint(1, 2)))
        syllables = (self.rng.choice("bdfgklmnprstvz") + self.rng.choice("aeiou") for _ in range(3))
        return "".join(syllables).capitalize()

    def question(self, wording: str, values: Values) -> str:
        """Returns a wording as one person would type it."""
        text = WORDING.sub(lambda match: self.rng.choice(match[1].split("|")), wording)
        if self.rng.random() < 0.2:
            text = self.drop_words(text)
        if self.rng.random() < 0.2:
            text = f"{self.rng.choice(WORDS.prefixes)} {text}"
        if self.rng.random() < 0.1:
            text = f"{text} {self.rng.choice(('please', 'thanks', 'for me', 'then'))}"
        text = " ".join(fill(text, values, written=False).split())
        if self.rng.random() < 0.5:
            text = text[:1].upper() + text[1:]
        return text + self.rng.choice(("", "?", "?", "."))

    def drop_words(self, text: str) -> str:
        """Leaves out some of the words that carry no meaning."""
        words = text.split()
        return " ".join(w for w in words if w not in WORDS.stop_words or self.rng.random() > 0.4)

    def outcome(self, kind: ToolKind, values: Values) -> tuple[str, str]:
        """Returns the result of a call, and the answer that tells it."""
        result, answer = self.rng.choice(kind.results), self.rng.choice(kind.answers)
        known = self.draw(f"{result} {answer}") | values
        return fill(result, known, written=True), fill(answer, known, written=True)


def fill(text: str, values: Values, *, written: bool) -> str:
    """Puts values into the slots of a text, as they are said or as they are written."""

    def value(match: re.Match[str]) -> str:
        said, _, other = values[match[1] + match[2]].partition("=")
        return (other or said) if written else said

    return SLOT.sub(value, text)


def arguments(kind: ToolKind, values: Values) -> dict[str, str | int]:
    """Returns the arguments of a call; a number is whole."""
    texts = {
        name: fill(kind.arguments.get(name, f"{{{name}}}"), values, written=True)
        for name in kind.parameters
    }
    return {k: v if kind.parameters[k] == "string" else int(v) for k, v in texts.items()}


def call_json(name: str, arguments: dict[str, str | int]) -> str:
    """Returns a call as it stands between the tokens of a call."""
    return json.dumps({"name": name, "arguments": arguments})
