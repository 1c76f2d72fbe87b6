"""`hearth chat` against scripted answers of the chat API."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from PIL import Image
from rich.console import Console

from services.cli.cluster import chat as chat_module
from services.cli.cluster.chat import (
    MAX_ROUNDS,
    ChatOptions,
    Terminal,
    TerminalChat,
    image_part,
    response_format,
    run_chat,
)
from services.client.first_answers import describe
from services.client.local_tools import find_tools
from services.gateway.text.chat_template import NO_TEMPLATE
from shared.errors import ConfigError, HearthError

TEXT = {"content": "It is noon."}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def call(name: str, *arguments: str) -> list[dict[str, Any]]:
    first = {"index": 0, "id": "call_1", "function": {"name": name, "arguments": ""}}
    rest = [{"index": 0, "function": {"arguments": each}} for each in arguments]
    return [{"tool_calls": [each]} for each in (first, *rest)]


class Gateway:
    """Answers each request with the next of `answers`, each a list of deltas."""

    has_template = True

    def __init__(self, *answers: list[dict[str, Any]]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._answers = iter(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "base"}, {"id": "demo"}]})
        self.bodies.append(json.loads(request.content))
        if not self.has_template:
            return httpx.Response(400, json={"error": {"message": NO_TEMPLATE}})
        bodies = [{"choices": [{"index": 0, "delta": each}]} for each in next(self._answers)]
        events = [f"data: {json.dumps(each)}\n\n" for each in bodies]
        return httpx.Response(200, text="".join([*events, "data: [DONE]\n\n"]))

    def chat(self, *, tools: str = "", **options: Any) -> tuple[TerminalChat, io.StringIO]:
        client = httpx.AsyncClient(transport=httpx.MockTransport(self), base_url="http://gateway")
        printed, terminal = io.StringIO(), Terminal()
        terminal.answers = terminal.notes = Console(file=printed, width=200)
        found = find_tools(tools) if tools else ()
        return TerminalChat(client, "demo", found, options, terminal), printed


async def test_a_call_is_run_and_its_result_sent() -> None:
    gateway = Gateway(call("clock", '{"city"', ': "Oslo"}'), [TEXT], [TEXT])
    chat, printed = gateway.chat(tools="clock")
    assert (await chat.ask("What time is it?")).text == "It is noon."
    first, second = gateway.bodies
    assert [each["function"]["name"] for each in first["tools"]] == ["clock"]
    user, assistant, result = second["messages"]
    assert user == {"role": "user", "content": "What time is it?"}
    arguments = {"name": "clock", "arguments": '{"city": "Oslo"}'}
    assert assistant["tool_calls"] == [{"id": "call_1", "type": "function", "function": arguments}]
    assert result["role"] == "tool" and result["tool_call_id"] == "call_1"
    assert re.fullmatch(r"\d\d:\d\d", result["content"])
    assert 'clock({"city": "Oslo"}) -> ' in printed.getvalue()
    await chat.ask("And now?")
    roles = [each["role"] for each in gateway.bodies[2]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"]


async def test_an_unknown_tool_is_an_error_that_the_model_sees() -> None:
    gateway = Gateway(call("oracle", "{}"), [TEXT])
    chat, _ = gateway.chat(tools="dice")
    await chat.ask("?")
    assert gateway.bodies[1]["messages"][-1]["content"] == "error: no tool oracle"


async def test_rounds_of_calls_end() -> None:
    chat, _ = Gateway(*[call("dice", "{}")] * MAX_ROUNDS).chat(tools="dice")
    with pytest.raises(HearthError, match="no answer after 8 rounds"):
        await chat.ask("?")


async def test_the_schema_of_a_file_is_demanded(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    gateway = Gateway([TEXT])
    chat, _ = gateway.chat(response_format=response_format(path))
    await chat.ask("?")
    wanted = gateway.bodies[0]["response_format"]
    assert wanted["type"] == "json_schema"
    assert wanted["json_schema"] == {"name": "answer", "schema": SCHEMA, "strict": True}


def test_a_file_without_a_schema_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.json: No such file"):
        response_format(tmp_path / "no.json")
    with pytest.raises(ConfigError, match=r"--json /dev/zero has more than 4194304 bytes"):
        response_format(Path("/dev/zero"))
    for content in ("{", "[1]"):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ConfigError, match=r"bad\.json is not a JSON Schema"):
            response_format(tmp_path / "bad.json")


async def test_first_question_shows_the_images(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"  # the content counts
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    gateway = Gateway([TEXT], [TEXT])
    chat, _ = gateway.chat()
    chat.images = [image_part(path)]
    await chat.ask("What is it?")
    await chat.ask("And now?")
    content = gateway.bodies[0]["messages"][0]["content"]
    url = {"url": "data:image/png;base64,iVBORw0KGgo="}
    assert content == [
        {"type": "image_url", "image_url": url},
        {"type": "text", "text": "What is it?"},
    ]
    assert gateway.bodies[1]["messages"][-1]["content"] == "And now?"


def test_a_file_that_is_no_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.png: No such file"):
        image_part(tmp_path / "no.png")
    (tmp_path / "a.png").write_bytes(b"<svg/>")
    with pytest.raises(ConfigError, match=r"a\.png must be a JPEG, PNG, WebP or GIF"):
        image_part(tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_images_are_known_by_their_content(tmp_path: Path, kind: str) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "no suffix", kind)
    url = image_part(tmp_path / "no suffix")["image_url"]["url"]
    assert url.startswith(f"data:image/{kind.lower()};base64,")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Gateway]:
    """Runs `hearth chat` with these options, and these lines at standard input."""

    def run_with(*answers: Any, lines: str = "", **options: Any) -> Gateway:
        gateway = Gateway(*answers)

        def client(url: str, api_key: str, certificate: str) -> httpx.AsyncClient:
            return httpx.AsyncClient(transport=httpx.MockTransport(gateway), base_url=url)

        monkeypatch.setattr(chat_module, "gateway_client", client)
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        run_chat("http://gateway", "key", ChatOptions(**options))
        return gateway

    return run_with


def test_one_question_prints_its_answer_alone(run: Any, capsys: Any) -> None:
    gateway = run([TEXT], question="What time is it?", system="Be brief.", model="demo")
    printed = capsys.readouterr()
    assert printed.out == "It is noon.\n"
    assert "first token" in printed.err
    (body,) = gateway.bodies
    assert [each["role"] for each in body["messages"]] == ["system", "user"]
    assert body["model"] == "demo"
    run([TEXT], question="?", is_quiet=True)
    assert capsys.readouterr() == ("It is noon.\n", "")


async def test_no_word_is_cut_at_80_columns() -> None:
    text = "The KV cache of decode.a1b2c3d4e5f6 holds 5,461 blocks of 16 tokens each. " * 3
    chat, printed = Gateway([{"content": text}]).chat()
    chat.terminal.answers = chat.terminal.notes = Console(
        file=printed, width=80, force_terminal=True, color_system=None
    )
    hearth = {"prefill_worker": "prefill.0123456789ab", "decode_worker": "decode.a1b2c3d4e5f6"}
    reply = msgspec.structs.replace(await chat.ask("?"), hearth=hearth)
    chat.terminal.answers.print()
    chat.terminal.note(describe(reply))
    lines = re.sub(r"\x1b\[\d+D\x1b\[K", "", printed.getvalue()).splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert {*text.split(), *describe(reply).split()} <= {*words}
    assert words.count("decode.a1b2c3d4e5f6") == 4


def test_commands_are_not_sent_to_the_model(run: Any, capsys: Any) -> None:
    gateway = run([TEXT], [TEXT], lines="/help\n/hlep\nHi\n/tmp is what?\n/quit\nHi\n")
    assert [each["messages"][-1]["content"] for each in gateway.bodies] == ["Hi", "/tmp is what?"]
    assert "no such command: /hlep" in capsys.readouterr().err


def test_system_prompt_begins_each_conversation(run: Any) -> None:
    gateway = run([TEXT], [TEXT], [TEXT], lines="a\nb\n/new\nc\n", system="Be brief.")
    roles = [[each["role"][0] for each in body["messages"]] for body in gateway.bodies]
    assert roles == [["s", "u"], ["s", "u", "a", "u"], ["s", "u"]]


def test_base_model_is_named_with_what_to_do(run: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Gateway, "has_template", False)
    with pytest.raises(HearthError, match=r"no chat template: use /v1/completions, or .* FILE"):
        run(question="?")


def test_model_that_is_not_served_is_named(run: Any) -> None:
    with pytest.raises(ConfigError, match=r"no model large is served at .*, only base, demo"):
        run(question="?", model="large")
