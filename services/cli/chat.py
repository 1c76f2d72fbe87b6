"""`hearth chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys

import httpx
from rich.console import Console

from services.client.chat_request import first_model, gateway_client, stream_chat
from services.client.first_answers import describe, text_printer
from services.local.state import clusters_dir, running_cluster
from shared.clock import MonotonicClock
from shared.errors import ConfigError, HearthError

HINT = "/new starts a new conversation, /quit or Ctrl-D ends"


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


def run_chat(url: str | None, api_key: str | None) -> None:
    """Returns when the user ends the conversation. Shows a failed request and continues."""
    found_url, found_key = find_gateway(url, api_key)
    with asyncio.Runner() as runner:
        client = gateway_client(found_url, found_key)
        try:
            _converse(runner, client, runner.run(first_model(client)).id)
        finally:
            runner.run(client.aclose())


def _converse(runner: asyncio.Runner, client: httpx.AsyncClient, model: str) -> None:
    console, clock = Console(highlight=False), MonotonicClock()
    console.print(f"[bold]{model}[/bold] at {client.base_url}   [dim]{HINT}[/dim]")
    history: list[dict[str, str]] = []
    while (line := _read_line(console)) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            history.clear()
            continue
        if not line:
            continue
        question = {"role": "user", "content": line}
        try:
            reply = runner.run(
                stream_chat(client, model, [*history, question], clock, text_printer(console))
            )
        except HearthError as error:
            console.print(f"\n{error.message}", style="red", markup=False)
            continue
        except KeyboardInterrupt:
            console.print("\n(interrupted)", style="dim")
            continue
        history += [question, {"role": "assistant", "content": reply.text}]
        console.print(f"\n{describe(reply)}", style="dim", markup=False)


def _read_line(console: Console) -> str | None:
    """None at the end of the input."""
    try:
        return console.input("[bold]> [/bold]" if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
