"""Runs `hearth chat`: a conversation in the terminal, or the answer to one question.

Answers go to standard output, all else to standard error.
"""

from __future__ import annotations

import asyncio
import base64
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from services.cli.options import read_given_file
from services.cli.output import text_console
from services.client.chat_request import (
    ChatReply,
    RequestedCall,
    first_model,
    gateway_client,
    named_model,
    stream_chat,
)
from services.client.first_answers import describe, print_line, text_printer
from services.client.local_tools import LocalTool, find_tools
from services.local.state import clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.config import url_problems
from shared.errors import ConfigError, HearthError
from shared.transport.wire_errors import UNREADABLE

HINT = "/new starts a new conversation, /quit or Ctrl-D ends"
UNKNOWN = "no such command: {}; " + HINT
COMMAND = re.compile(r"/[a-z]+")
IMAGE_TYPES = {  # by how a file begins: its name may say anything
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "image/gif": re.compile(rb"GIF8[79]a"),
}
MAX_IMAGE_BYTES = 24 << 20
MAX_ROUNDS = 8  # rounds of calls, before an answer must come


class GatewayAddress(NamedTuple):
    """`model_name`: of the cluster's first model, empty if that is unknown. `certificate`: a PEM
    file of an HTTPS gateway of this machine.
    """

    url: str
    api_key: str
    model_name: str = ""
    certificate: str = ""


def find_gateway(url: str | None, api_key: str | None) -> GatewayAddress:
    """Returns URL and API key as given, else those of the local cluster. Raises ConfigError."""
    if url is not None:
        if api_key is None:
            raise ConfigError("--api-key (or HEARTH_API_KEY) is needed with --url")
        if problems := [*url_problems("--url", url, schemes=("http", "https"))]:
            raise ConfigError("; ".join(problems))
        return GatewayAddress(url, _checked_key(api_key))
    _, state = running_cluster(clusters_dir())
    key = state.api_key if api_key is None else api_key
    return GatewayAddress(state.url, _checked_key(key), state.model_name, state.http_cert)


def _checked_key(key: str) -> str:
    """Raises ConfigError for a key that no header can hold, and does not print it."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key (or HEARTH_API_KEY) has a character that no API key has")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The user's options.

    `question` is that of a single answer; None means a conversation. `model` None means the first
    of the cluster. `tools` are names of local tools that the model may call. `schema` is a file
    with the JSON Schema that answers match. `images` are files that the first question shows.
    """

    question: str | None = None
    model: str | None = None
    system: str = ""
    tools: str = ""
    schema: Path | None = None
    images: tuple[Path, ...] = ()
    is_quiet: bool = False


def run_chat(url: str | None, api_key: str | None, options: ChatOptions) -> None:
    """Returns when the user ends the conversation, whose failed requests are shown, or after the
    answer to one question. Raises ConfigError, and for one question HearthError.
    """
    tools = find_tools(options.tools) if options.tools else ()
    fields = {} if options.schema is None else {"response_format": response_format(options.schema)}
    images = [image_part(each) for each in options.images]
    found = find_gateway(url, api_key)
    with asyncio.Runner() as runner:
        client = gateway_client(found.url, found.api_key, found.certificate)
        try:
            if options.model is None:
                model = runner.run(first_model(client, found.model_name)).id
            else:
                model = runner.run(named_model(client, options.model)).id
            conversation = TerminalChat(client, model, tools, fields, Terminal(options.is_quiet))
            conversation.system, conversation.images = options.system, images
            if options.question is None:
                _converse(runner, conversation)
            else:
                _answer(runner, conversation, options.question)
        finally:
            runner.run(client.aclose())


class Terminal:
    """The terminal: answers go to standard output, messages about them to standard error."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.answers = text_console()
        self.notes = text_console(stderr=True)
        self.is_quiet = is_quiet

    def note(self, text: str, *, style: str = "dim") -> None:
        if not self.is_quiet:
            print_line(self.notes, text, style=style)

    def show_error(self, text: str) -> None:
        print_line(self.notes, text, style="red")


def response_format(path: Path) -> dict[str, Any]:
    """Returns the request's format for a JSON Schema in a file. Raises ConfigError for a file that
    cannot be read or is not JSON's object.
    """
    data = read_given_file(path, what="--json")
    try:
        schema = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(f"--json {path} is not a JSON Schema: {error}") from None
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


def image_part(path: Path) -> dict[str, Any]:
    """Returns the part of a message that shows the image in a file. Raises ConfigError for a file
    that cannot be read or is no image.
    """
    data = read_given_file(path, what="--image", max_bytes=MAX_IMAGE_BYTES)
    media_type = next((name for name, start in IMAGE_TYPES.items() if start.match(data)), None)
    if media_type is None:
        raise ConfigError(f"--image {path} must be a JPEG, PNG, WebP or GIF")
    text = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{text}"}}


class TerminalChat:
    """The messages so far, and the requests that continue them."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        tools: Sequence[LocalTool],
        options: dict[str, Any],
        terminal: Terminal,
    ) -> None:
        self.terminal = terminal
        self.title = f"{model} at {client.base_url}"
        self.system = ""
        self.images: list[dict[str, Any]] = []  # of the first question
        self._client, self._model, self._clock = client, model, MonotonicClock()
        self._tools = {each.name: each for each in tools}
        if tools:
            options = {**options, "tools": [each.definition for each in tools]}
        self._options = options
        self._history: list[dict[str, Any]] = []

    def clear(self) -> None:
        self._history.clear()

    async def ask(self, question: str) -> ChatReply:
        """Runs the calls that the model requests, until it answers in text. Prints both.

        The history grows only with the answer. Raises HearthError.
        """
        begun = [{"role": "system", "content": self.system}] if self.system else []
        history = self._history or begun
        messages = [*history, {"role": "user", "content": self._content(question)}]
        for _ in range(MAX_ROUNDS):
            reply = await self._request(messages)
            if not reply.calls:
                self._history = [*messages, {"role": "assistant", "content": reply.text}]
                return reply
            calls = [each.record for each in reply.calls]
            messages.append(
                {"role": "assistant", "content": reply.text or None, "tool_calls": calls}
            )
            messages += [self._run(each) for each in reply.calls]
        raise HearthError(f"no answer after {MAX_ROUNDS} rounds of calls")

    def _content(self, question: str) -> str | list[dict[str, Any]]:
        if not self.images or self._history:
            return question
        return [*self.images, {"type": "text", "text": question}]

    async def _request(self, messages: list[dict[str, Any]]) -> ChatReply:
        printer = text_printer(self.terminal.answers)
        client, clock = self._client, self._clock
        return await stream_chat(client, self._model, messages, clock, printer, **self._options)

    def _run(self, call: RequestedCall) -> dict[str, str]:
        """Returns the message with the result of a call."""
        tool = self._tools.get(call.name)
        result = f"error: no tool {call.name}" if tool is None else tool.result(call.arguments)
        self.terminal.note(f"{call.name}({call.arguments}) -> {result}", style="cyan")
        return {"role": "tool", "tool_call_id": call.id, "content": result}


def _answer(runner: asyncio.Runner, conversation: TerminalChat, question: str) -> None:
    reply = runner.run(conversation.ask(question))
    conversation.terminal.answers.print()
    conversation.terminal.note(describe(reply))


def _converse(runner: asyncio.Runner, conversation: TerminalChat) -> None:
    terminal = conversation.terminal
    terminal.note(f"{conversation.title}   {HINT}")
    while (line := _read_line(terminal)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            conversation.clear()
        elif line == "/help":
            terminal.note(HINT)
        elif COMMAND.fullmatch(line):
            terminal.show_error(UNKNOWN.format(line))
        elif line:
            _show_reply(runner, conversation, line)


def _show_reply(runner: asyncio.Runner, conversation: TerminalChat, question: str) -> None:
    terminal = conversation.terminal
    try:
        reply = runner.run(conversation.ask(question))
    except HearthError as error:
        terminal.show_error(f"\n{error.message}")
    except KeyboardInterrupt:
        terminal.note("\n(interrupted)")
    else:
        terminal.answers.print()
        terminal.note(describe(reply))


def _read_line(terminal: Terminal) -> str | None:
    """Reads a line. Returns None at the end of the input. Raises ConfigError."""
    try:
        return terminal.answers.input("[bold]> [/bold]" if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        terminal.notes.print()
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from None
