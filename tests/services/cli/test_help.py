"""The help of every command at 80 columns: no name is cut, no option is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from services.__main__ import app
from tests.services.cli.in_process import call_hearth


def all_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from all_commands(each, (*path, name))


def test_help_has_every_option_in_full_at_80_columns() -> None:
    for path, command in all_commands(typer.main.get_command(app)):
        text = call_hearth((*path, "--help"), {"COLUMNS": "80"}).stdout
        shown = set(re.findall(r"--(?:\[no-\])?[\w-]+", text))
        for each in command.params:
            if each.param_type_name == "option":
                name = max(each.opts, key=len)
                assert {name, f"--[no-]{name.removeprefix('--')}"} & shown, (path, name)
        body = text.partition("\nExample")[0]
        assert max(map(len, body.splitlines())) <= 80, path


def test_short_option_prints_help() -> None:
    for arguments in ((), ("tenant",), ("tenant", "add"), ("decode",)):
        short, long = (call_hearth((*arguments, each), {}) for each in ("-h", "--help"))
        assert short.returncode == 0 and short.stdout == long.stdout


def test_flags_have_no_value_and_defaults_are_said_once() -> None:
    text = call_hearth(("decode", "--help"), {"COLUMNS": "80"}).stdout
    assert re.search(r"--\[no-\]parked  +Start in standby", text)
    assert re.search(r"--kv-cache-bytes SIZE", text)
    assert "<" not in text.replace("ROLE-<6 hex digits>", "").replace("<6 hex", "")
    assert text.index("\nConnections:") < text.index("--nats-url URL") < text.index("\nProcess:")
    assert len(text.splitlines()) < 175
    assert re.search(r"--check  +Ask two", call_hearth(("up", "--help"), {"COLUMNS": "80"}).stdout)
