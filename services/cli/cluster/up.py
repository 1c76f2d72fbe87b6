"""`hearth up`: starts a cluster on this machine, shows its first answers, and stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from services.cli.model_check import check_models
from services.cli.output import text_console
from services.client.first_answers import QUESTIONS, first_requests
from services.local.cluster import LocalCluster
from services.local.plan import UpOptions
from services.local.state import clusters_dir
from services.local.supervisor import Event
from shared.background import start_awaited
from shared.clock import Clock, MonotonicClock
from shared.nats_urls import authority
from shared.telemetry.line_writer import replace_standard_streams
from shared.telemetry.log import configure_logging
from shared.tls import certificate_names


def run_up(options: UpOptions, *, is_check: bool) -> None:
    """Returns after Ctrl-C or SIGTERM; for a check, after the first answers."""
    configure_logging("up", level="error")  # the observer's connection would log its end
    check_models(options)
    asyncio.run(_up(options, is_check=is_check))


async def _up(options: UpOptions, *, is_check: bool) -> None:
    console, clock = text_console(), MonotonicClock()
    display = StartupDisplay(console, clock)
    try:
        cluster = LocalCluster(
            options,
            clock,
            state_parent=clusters_dir(),
            report=display.report,
        )
        serving = start_awaited(_serve(cluster, display, console, clock, is_check=is_check))
        _stop_on_signals(serving, cluster)
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        console.print("stopped")
    finally:
        display.close()


async def _serve(
    cluster: LocalCluster,
    display: StartupDisplay,
    console: Console,
    clock: Clock,
    *,
    is_check: bool,
) -> None:
    replace_standard_streams()  # a terminal or pipe that does not read must not stop a supervisor
    async with cluster:
        display.close()
        try:
            is_chat = await first_requests(
                cluster.url,
                cluster.api_key,
                console,
                clock,
                observer=cluster.observer,
                is_check=is_check,
                model_name=cluster.model_name,
                certificate=cluster.http_cert,
            )
            console.print(f"ready in {display.elapsed_s:.1f} s   {cluster.url}/v1", style="bold")
            if not is_check:
                _show_gateway(cluster, console, is_chat=is_chat)
                await asyncio.Event().wait()
        finally:
            console.print("stopping …", style="dim")


def _stop_on_signals(serving: asyncio.Task[None], cluster: LocalCluster) -> None:
    """Stops the cluster in order on the first signal, and kills it on the second."""
    is_stopping = False

    def on_signal() -> None:
        nonlocal is_stopping
        if is_stopping:
            cluster.kill()
        else:
            is_stopping = True
            serving.cancel()

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(each, on_signal)


class StartupDisplay:
    """Shows the progress of the start: one spinner per process on a terminal, else one line."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._started = clock.now()
        self._tasks: dict[str, TaskID] = {}
        self._is_open = True
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=False,
            disable=not console.is_terminal,
        )
        self._progress.start()

    @property
    def elapsed_s(self) -> float:
        return self._clock.now() - self._started

    def report(self, process_id: str, event: Event, details: str) -> None:
        if event == "ended":
            self._console.print(f"{process_id} {details}", style="red", soft_wrap=True)
        elif event == "waiting":
            self._show_waiting(process_id, details)
        elif event == "restarting":
            self._console.print(f"{process_id} is started again", style="yellow")
        elif self._is_open and event == "started":
            self._tasks[process_id] = self._progress.add_task(process_id, total=1)
        elif self._is_open:
            if process_id in self._tasks:  # otherwise it is a model
                self._progress.update(self._tasks[process_id], completed=1)
            if not self._console.is_terminal:
                self._console.print(f"{process_id} ready after {self.elapsed_s:.1f} s")

    def _show_waiting(self, process_id: str, doing: str) -> None:
        if process_id in self._tasks and self._console.is_terminal:
            text = f"{process_id}: {doing}"
            self._progress.update(self._tasks[process_id], description=text)
        else:
            text = f"after {self.elapsed_s:.0f} s {process_id} {doing}"
            self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._progress.stop()


def _show_gateway(cluster: LocalCluster, console: Console, *, is_chat: bool) -> None:
    """`is_chat`: whether the model has a chat template."""
    console.print(f"page     {page_link(cluster)}", soft_wrap=True)
    console.print(f"API key  {cluster.api_key}", soft_wrap=True)
    console.print(f"logs     {_short(cluster.state_dir / 'logs')}", soft_wrap=True)
    if cluster.is_kept:
        state = f"state    {_short(cluster.state_dir)}: the next start with it goes on"
        console.print(state, soft_wrap=True)
    if is_chat:
        console.print(f"chat     {own_command()} chat", soft_wrap=True)
    for title, command in _examples(cluster) if is_chat else _base_examples(cluster):
        console.print(title, style="dim")
        console.print(command, soft_wrap=True)
    console.print("Ctrl-C stops everything", style="dim")


def page_link(cluster: LocalCluster) -> str:
    """Returns the address of the page with its keys in the fragment, which no server gets."""
    given = {
        "key": cluster.api_key,
        "operator": cluster.operator_token,
        "model": cluster.model_name,
    }
    return f"{cluster.url}/#{urlencode(given)}"


def own_command() -> str:
    """Returns how this shell starts `hearth`: by its name, or by its path if it is another one or
    none that the PATH leads to.
    """
    found, own = shutil.which("hearth"), Path(sys.argv[0]).resolve()
    if found is not None and Path(found).resolve() == own:
        return "hearth"
    if own.name == "__main__.py":  # python -m services
        return f"{shlex.quote(sys.executable)} -m {own.parent.name}"
    here = Path.cwd()
    return shlex.quote(str(own.relative_to(here) if own.is_relative_to(here) else own))


def _examples(cluster: LocalCluster) -> Iterator[tuple[str, str]]:
    """Yields the title and the command of one request for each API."""
    model = {"model": cluster.model_name}
    messages = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "stream": True}
    yield "OpenAI's API:", _curl(cluster, "/v1/chat/completions", model | messages)
    limit = {"max_tokens": 256}
    yield "Anthropic's:", _curl(cluster, "/v1/messages", model | limit | messages)
    run = f"/client/v4/accounts/{cluster.tenant_id}/ai/run/{quote(cluster.model_name, safe='/@')}"
    yield "Workers AI's:", _curl(cluster, run, {"prompt": QUESTIONS[0], "stream": True})
    if cluster.client_url is not None:
        program = [sys.executable, "-m", "services.client.example_chat"]
        given = [cluster.client_url, QUESTIONS[1], cluster.model_name]
        yield "over NATS:", shlex.join([*program, *given])


def _base_examples(cluster: LocalCluster) -> Iterator[tuple[str, str]]:
    body = {"model": cluster.model_name, "prompt": "Once upon a time", "stream": True}
    yield "OpenAI's API:", _curl(cluster, "/v1/completions", body)


def _curl(cluster: LocalCluster, path: str, body: dict[str, Any]) -> str:
    headers = (f"Authorization: Bearer {cluster.api_key}", "Content-Type: application/json")
    words = ["curl", "-N", *curl_target(cluster.url, cluster.http_cert, path)]
    words += [word for each in headers for word in ("-H", each)]
    return shlex.join([*words, "-d", msgspec.json.encode(body).decode()])


def curl_target(url: str, certificate: str, path: str) -> list[str]:
    """Returns the options and the URL with which curl verifies the gateway's certificate: by a name
    that is in it.
    """
    if not certificate:
        return [f"{url}{path}"]
    parts, names = urlsplit(url), certificate_names(certificate)
    trust = ["--cacert", certificate]
    name = next((each for each in names if "*" not in each), None)
    if parts.hostname in names or name is None:
        return [*trust, f"{url}{path}"]
    host = authority(name, parts.port or 443)
    return [*trust, "--connect-to", f"{host}:{parts.netloc}", f"https://{host}{path}"]


def _short(path: Path) -> str:
    home = os.environ.get("HOME")
    text = str(path)
    return f"~{text[len(home) :]}" if home and text.startswith(f"{home}/") else text
