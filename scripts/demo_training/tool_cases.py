"""Questions that need one of four tools or none, on which a checkpoint is scored."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from demo_training.chat_format import CALL, CALL_END
from demo_training.corpus import Corpus
from demo_training.tool_dialogues import (
    OfferedTool,
    ToolCorpus,
    ToolDialogues,
    ToolKind,
    call_json,
)

NUM_OFFERED = 4
CALLS = re.compile(re.escape(CALL) + "(.*?)" + re.escape(CALL_END), re.DOTALL)
TRAINED_QUESTIONS = 300
SAMPLED_QUESTIONS = 20_000  # the corpus's runs of six words are taken from these
GRAM = 6


@dataclass(frozen=True)
class ToolCase:
    """A question, the tools that are offered, and the calls that are expected, or none."""

    question: str
    tools: tuple[OfferedTool, ...]
    calls: tuple[str, ...]

    def chat(self) -> tuple[list[dict[str, str]], list[dict[str, Any]]]:
        """Returns the question as the only message, and the tools."""
        return [{"role": "user", "content": self.question}], self.schemas()

    def schemas(self) -> list[dict[str, Any]]:
        """Returns the tools in the form of a request."""
        return [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": {
                        "type": "object",
                        "properties": {k: {"type": v} for k, v in tool.kind.parameters.items()},
                        "required": list(tool.kind.parameters),
                    },
                },
            }
            for tool in self.tools
        ]

    def score(self, output: str) -> tuple[bool, bool]:
        """Whether the output calls the right tools or none, and with right arguments."""
        calls = CALLS.findall(output)
        names = [name_of(call) for call in calls]
        expected = [name_of(call) for call in self.calls]
        return names == expected, tuple(calls) == self.calls


def name_of(call: str) -> str | None:
    """Returns the name in a call, or None if the call is not JSON with a name."""
    try:
        name = json.loads(call)["name"]
    except (ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None


class HeldOutTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The questions of one tool, each followed by the values of its arguments."""

    name: str
    questions: tuple[tuple[str | int, ...], ...]


class HeldOutNone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Questions that need no tool, and (name, question) that need a tool that is absent."""

    questions: tuple[str, ...]
    absent: tuple[tuple[str, str], ...]


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of ``held_out_tools.toml``."""

    tool: tuple[HeldOutTool, ...]
    none: HeldOutNone

    def texts(self) -> list[str]:
        """Returns every question."""
        needed = [str(entry[0]) for tool in self.tool for entry in tool.questions]
        return [*needed, *self.none.questions, *(question for _, question in self.none.absent)]


def read_held_out(folder: Path) -> HeldOut:
    """Reads the held-out questions for tools."""
    return msgspec.toml.decode((folder / "held_out_tools.toml").read_bytes(), type=HeldOut)


def held_out_cases(folder: Path, corpus: ToolCorpus) -> list[ToolCase]:
    """Returns the held-out questions, each with four tools in a random order of its own."""
    rng = random.Random(11)
    held_out = read_held_out(folder)
    kind_of = {kind.names[0]: kind for kind in corpus.tool}

    def offer(needed: ToolKind | None, absent: ToolKind | None) -> tuple[OfferedTool, ...]:
        others = [kind for kind in corpus.tool if kind not in (needed, absent)]
        kinds = rng.sample(others, NUM_OFFERED - (needed is not None))
        kinds += [] if needed is None else [needed]
        rng.shuffle(kinds)
        return tuple(OfferedTool(kind, kind.names[0], kind.descriptions[0]) for kind in kinds)

    cases = []
    for tool in held_out.tool:
        kind = kind_of[tool.name]
        for question, *values in tool.questions:
            arguments = dict(zip(kind.parameters, values, strict=True))
            calls = (call_json(tool.name, arguments),)
            cases.append(ToolCase(str(question), offer(kind, None), calls))
    cases += [ToolCase(question, offer(None, None), ()) for question in held_out.none.questions]
    absent = held_out.none.absent
    cases += [ToolCase(question, offer(None, kind_of[name]), ()) for name, question in absent]
    return cases


def trained_cases(corpus: ToolCorpus) -> list[ToolCase]:
    """Returns questions as the training draws them."""
    dialogues = ToolDialogues(corpus, random.Random(12))
    cases = []
    for number in range(TRAINED_QUESTIONS):
        tools = dialogues.offer()
        draw = dialogues.missing if number % 4 == 0 else dialogues.needed
        exchange = draw(tools)
        cases.append(ToolCase(exchange.question, tuple(tools), exchange.calls))
    return cases


def grams(text: str) -> set[tuple[str, ...]]:
    """Returns all runs of six words of a text, without case and punctuation."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {tuple(words[i : i + GRAM]) for i in range(len(words) - GRAM + 1)}


def shared_grams(folder: Path, tools: ToolCorpus, corpus: Corpus) -> set[tuple[str, ...]]:
    """Returns the runs of six words that held-out questions for tools share with the corpus."""
    dialogues = ToolDialogues(tools, random.Random(13))
    sampled = (dialogues.needed(dialogues.offer()).question for _ in range(SAMPLED_QUESTIONS))
    trained = set().union(*map(grams, (*sampled, *corpus.texts())))
    return set().union(*map(grams, read_held_out(folder).texts())) & trained
