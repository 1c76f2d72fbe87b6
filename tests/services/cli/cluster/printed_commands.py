"""The commands that `hearth up` prints, copied into a shell in the folder where it was started."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.services.cli.cluster.running_up import Up
from tests.support.services.running import ROOT, WAIT_S, environ_for

TALK = "Hello\n/new\nHello\n/quit\n"


def check_printed_commands(up: Up, model: str, *, decode_worker: str) -> None:
    """Each answers with a text of this model; `hearth chat` says which worker has decoded it."""
    _, _, printed = up.printed().partition("\nready in ")
    lines = dict(re.findall(r"^(page|chat|logs) +(.+)$", printed, re.MULTILINE))
    assert httpx.get(lines["page"]).status_code == 200
    assert Path(lines["logs"]).is_dir()
    chat = _in_shell(lines["chat"], up, TALK)
    answered = rf"first token [\d.]+ ms .* decode {decode_worker}"
    assert len(re.findall(answered, chat.stderr)) == 2, chat.stderr
    *curls, example = re.findall(r"^[\w' ]+:\n(.+)$", printed, re.MULTILINE)
    assert [each.split()[0] for each in curls] == ["curl"] * 3
    for each in curls:
        events = [*_events(_in_shell(each, up).stdout)]
        assert "".join(map(_text_of, events)).strip(), events
        assert set(_models_of(events)) <= {model}
    assert _in_shell(example, up).stdout.strip()


def _in_shell(command: str, up: Up, text: str = "") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environ_for(up.state_home),
        input=text,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def _events(output: str) -> Iterator[dict[str, Any]]:
    """Yields the server-sent events of an answer."""
    for line in output.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def _text_of(event: dict[str, Any]) -> str:
    choices = event.get("choices") or [{}]
    texts = (
        choices[0].get("delta", {}).get("content"),  # OpenAI's
        event.get("delta", {}).get("text"),  # Anthropic's
        event.get("response"),  # Workers AI's
    )
    return next(filter(None, texts), "")


def _models_of(events: list[dict[str, Any]]) -> Iterator[str]:
    for each in (found for event in events for found in (event, event.get("message", {}))):
        if "model" in each:
            yield each["model"]
