"""An agent of 20 turns and three tools: a decode worker's death leaves its transcript the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from tokenizers import Tokenizer

from tests.support.cluster.hearth_up import Cluster, run_cluster
from tests.wide.checkpoint import ANSWER, write_wide_checkpoint

pytestmark = pytest.mark.long

MODEL = "wide"
NUM_TURNS = 20
DEADLY_TURN = 7
HOT = 2.0  # temperature, the highest allowed: names and arguments vary


def parameters(**properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


LINES = {"type": "array", "items": {"type": "string", "minLength": 8, "maxLength": 30}}
NEVER = -100  # a bias
SCHEMAS = {
    "clock": parameters(zone={"type": "string", "maxLength": 20}, style={"enum": ["12h", "24h"]}),
    "dice": parameters(sides={"type": "integer", "minimum": 2, "maximum": 100}),
    "store": parameters(lines={**LINES, "minItems": 1, "maxItems": 60}),
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""

    @property
    def record(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    @property
    def result(self) -> str:
        """Depends on all of the arguments; raises ValidationError if they are invalid."""
        arguments = json.loads(self.arguments)
        jsonschema_rs.validate(SCHEMAS[self.name], arguments)
        return f"{self.name} got {sum(self.arguments.encode())}"


@dataclass
class Agent:
    """A conversation, as a client keeps it."""

    cluster: Cluster
    client: openai.OpenAI
    closing: int  # the token of a list's end
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)

    def take_turn(self, turn: int, victims: list[str] | None = None) -> None:
        """Kills the decode worker of the call, if `victims` is given, and appends its name."""
        self.messages.append({"role": "user", "content": f"Question {turn}."})
        calls = self._call(turn, victims)
        self.messages.append(
            {"role": "assistant", "content": None, "tool_calls": [each.record for each in calls]}
        )
        for each in calls:
            result = {"role": "tool", "tool_call_id": each.id, "content": each.result}
            self.messages.append(result)
        self.calls += calls
        done = self.client.chat.completions.create(
            model=MODEL, messages=self.messages, tools=TOOLS, temperature=0
        )
        assert done.choices[0].finish_reason == "stop"
        self.messages.append({"role": "assistant", "content": done.choices[0].message.content})

    def _call(self, turn: int, victims: list[str] | None) -> list[Call]:
        """One or more calls, streamed: of any tool, in the deadly turn of a long list."""
        options: dict[str, Any] = {"tool_choice": "required"}
        if turn == DEADLY_TURN:
            options["tool_choice"] = {"type": "function", "function": {"name": "store"}}
            options["logit_bias"] = {str(self.closing): NEVER}
        stream = self.client.chat.completions.create(
            model=MODEL,
            messages=self.messages,
            tools=TOOLS,
            temperature=HOT,
            seed=turn,
            max_tokens=4000,
            stream=True,
            stream_options={"include_usage": True},
            **options,
        )
        calls: list[Call] = []
        finished, chunk = [], None
        for chunk in stream:
            for choices in chunk.choices:
                for delta in choices.delta.tool_calls or []:
                    if delta.id is not None:
                        assert delta.index == len(calls)
                        calls.append(Call(delta.id, delta.function.name))
                    calls[delta.index].arguments += delta.function.arguments or ""
                finished += [choices.finish_reason] if choices.finish_reason else []
            if victims == [] and calls and len(calls[0].arguments) > 40:
                victims.append(kill_decode_worker(self.cluster))
        assert finished == ["tool_calls"]
        if victims:
            assert chunk.model_extra["hearth"]["num_resubmissions"] >= 1
            assert chunk.model_extra["hearth"]["decode_worker"] != victims[0]
        return calls

    def fork(self) -> Agent:
        return replace(self, messages=[*self.messages], calls=[*self.calls])

    @property
    def transcript(self) -> list[dict[str, Any]]:
        """The messages with calls numbered: ids differ between conversations."""
        text = json.dumps(self.messages)
        for number, call in enumerate(self.calls):
            text = text.replace(call.id, str(number))
        return json.loads(text)


def kill_decode_worker(cluster: Cluster) -> str:
    """Kills the worker that decodes the only request; returns its name."""
    newest = cluster.wait_for_heartbeats(
        lambda h: any(each.load and each.load.num_running for each in h.values())
    )
    victim = next(p for p, each in newest.items() if each.load and each.load.num_running)
    assert victim.startswith("decode-")
    cluster.kill(victim)
    return victim


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide_checkpoint(tmp_path_factory.mktemp("agent") / MODEL)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Cluster]:
    options = ("--model", str(checkpoint), "--decode", "2")
    with run_cluster(tmp_path_factory.mktemp("cluster"), *options) as running:
        running.wait_until_ready("decode-1", "decode-2")
        yield running


def test_transcript_is_the_same_though_decode_dies_in_a_call(
    cluster: Cluster, checkpoint: Path
) -> None:
    closing = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).token_to_id("]")
    undisturbed, victims = Agent(cluster, cluster.sdk, closing), list[str]()
    for turn in range(1, DEADLY_TURN):
        undisturbed.take_turn(turn)
    disturbed = undisturbed.fork()
    undisturbed.take_turn(DEADLY_TURN)
    disturbed.take_turn(DEADLY_TURN, victims)
    assert len(victims) == 1
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(take_last_turns, (undisturbed, disturbed)))
    assert disturbed.transcript == undisturbed.transcript
    assert {call.name for call in disturbed.calls} == SCHEMAS.keys()
    assert len({call.id for call in disturbed.calls}) == len(disturbed.calls) >= NUM_TURNS
    assert disturbed.messages[-1]["content"] == ANSWER


def take_last_turns(agent: Agent) -> None:
    for turn in range(DEADLY_TURN + 1, NUM_TURNS + 1):
        agent.take_turn(turn)
