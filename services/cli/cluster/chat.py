"""`hearth chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from services.cli.options import read_given_file
from services.client.chat_request import (
    ChatReply,
    RequestedCall,
    first_model,
    gateway_client,
    stream_chat,
)
from services.client.first_answers import describe, text_printer
from services.client.local_tools import LocalTool, find_tools
from services.local.state import clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.errors import ConfigError, HearthError
from shared.transport.wire_errors import UNREADABLE

HINT = "/new starts a new conversation, /quit or Ctrl-D ends"
MAX_ROUNDS = 8  # rounds of calls, before an answer must come


def find_gateway(url: str | None, api_key: str | None) -> tuple[str, str]:
    """URL and API key as given, else those of the local cluster. Raises ConfigError."""
    if url is not None:
        if api_key is None:
            raise ConfigError("--api-key (or HEARTH_API_KEY) is needed with --url")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"--url {url!r} must start with http:// or https://")
        return url, api_key
    _, state = running_cluster(clusters_dir())
    return state.url, state.api_key if api_key is None else api_key


def run_chat(
    url: str | None, api_key: str | None, *, tools: str = "", schema: Path | None = None
) -> None:
    """Returns when the user ends the conversation. Shows a failed request and continues.

    `tools`: names of local tools that the model may call. `schema`: of a file with the JSON Schema
    that answers match. Raises ConfigError, for these too.
    """
    local_tools = find_tools(tools) if tools else ()
    options = {} if schema is None else {"response_format": response_format(schema)}
    found_url, found_key = find_gateway(url, api_key)
    with asyncio.Runner() as runner:
        client = gateway_client(found_url, found_key)
        try:
            model = runner.run(first_model(client)).id
            conversation = TerminalChat(
                client, model, local_tools, options, Console(highlight=False)
            )
            _converse(runner, conversation)
        finally:
            runner.run(client.aclose())


def response_format(path: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that cannot be read or is not JSON's object."""
    data = read_given_file(path, what="--json")
    try:
        schema = msgspec.json.decode(data, type=dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(f"--json {path} is not a JSON Schema: {error}") from None
    return {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }


class TerminalChat:
    """The messages so far, and the requests that continue them."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        model: str,
        tools: Sequence[LocalTool],
        options: dict[str, Any],
        console: Console,
    ) -> None:
        self.console = console
        self.title = f"[bold]{model}[/bold] at {client.base_url}"
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
        messages = [*self._history, {"role": "user", "content": question}]
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

    async def _request(self, messages: list[dict[str, Any]]) -> ChatReply:
        printer = text_printer(self.console)
        client, clock = self._client, self._clock
        return await stream_chat(client, self._model, messages, clock, printer, **self._options)

    def _run(self, call: RequestedCall) -> dict[str, str]:
        """Returns the message with the result of a call."""
        tool = self._tools.get(call.name)
        result = f"error: no tool {call.name}" if tool is None else tool.result(call.arguments)
        line = f"{call.name}({call.arguments}) -> {result}"
        self.console.print(line, style="cyan", markup=False, soft_wrap=True)
        return {"role": "tool", "tool_call_id": call.id, "content": result}


def _converse(runner: asyncio.Runner, conversation: TerminalChat) -> None:
    console = conversation.console
    console.print(f"{conversation.title}   [dim]{HINT}[/dim]")
    while (line := _read_line(console)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            conversation.clear()
            continue
        if not line:
            continue
        try:
            reply = runner.run(conversation.ask(line))
        except HearthError as error:
            console.print(f"\n{error.message}", style="red", markup=False)
        except KeyboardInterrupt:
            console.print("\n(interrupted)", style="dim")
        else:
            console.print(f"\n{describe(reply)}", style="dim", markup=False)


def _read_line(console: Console) -> str | None:
    """Reads a line. Returns None at the end of the input."""
    try:
        return console.input("[bold]> [/bold]" if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
