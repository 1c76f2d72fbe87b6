"""The help of commands in plain columns: options in groups, and no name is ever cut."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import groupby
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

MAX_WIDTH = 100  # of the text on wide terminals
SETTINGS = {"max_content_width": MAX_WIDTH, "help_option_names": ["-h", "--help"]}
NAME_WIDTH = 28  # the text of a longer name begins on the next line
_TYPES = {"int": "N", "int range": "N", "float": "X", "float range": "X", "str": "TEXT"}
_TYPES |= {"path": "PATH", "file": "FILE", "directory": "DIR", "integer": "N", "text": "TEXT"}


class HelpCommand(TyperCommand):
    """A command whose help lists variables of the environment beside their options."""

    shows_variables = True

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *map(_usage, filter(_is_argument, self.get_params(ctx)))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter, shows_variables=self.shows_variables)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self.epilog or "", formatter)


class ServiceHelpCommand(HelpCommand):
    """The command of a service: each option has a variable, as the epilog says."""

    shows_variables = False


class HelpGroup(TyperGroup):
    """A group of commands. Their texts are shown in full."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter, shows_variables=True)
        commands = [(each, self.get_command(ctx, each)) for each in self.list_commands(ctx)]
        sections = {
            panel: [(name, _first_paragraph(command.help)) for name, command in found]
            for panel, found in _by_panel(commands, "Commands")
        }
        _write_sections(sections, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_epilog(self.epilog or "", formatter)


def use_plain_help(app: typer.Typer) -> None:
    """Gives all commands of the app, and of the apps within it, their help."""
    app.info.cls, app.info.context_settings = HelpGroup, SETTINGS
    for command in app.registered_commands:
        if command.cls is None or not issubclass(command.cls, HelpCommand):
            command.cls = HelpCommand
        command.context_settings = {**(command.context_settings or {}), **SETTINGS}
    for group in app.registered_groups:
        group.cls, group.context_settings = HelpGroup, SETTINGS
        if group.typer_instance is not None:
            use_plain_help(group.typer_instance)


def _write_options(command: Any, ctx: Any, formatter: Any, *, shows_variables: bool) -> None:
    given = [(each, each) for each in command.get_params(ctx) if not getattr(each, "hidden", False)]
    arguments = [each for each, _ in given if _is_argument(each)]
    options = [pair for pair in given if not _is_argument(pair[0])]

    def row(param: Any) -> tuple[str, str]:
        return _names(param, ctx), _text(param, ctx, shows_variables=shows_variables)

    sections = {"Arguments": [row(each) for each in arguments]}
    for panel, found in _by_panel(options, "Options"):
        sections[panel] = [row(each) for each, _ in found]
    _write_sections(sections, formatter)


def _by_panel(named: Iterable[tuple[Any, Any]], default: str) -> Iterator[tuple[str, list[Any]]]:
    """Yields the pairs by the panel of their second part, the default panel last."""

    def panel(pair: tuple[Any, Any]) -> str:
        name = getattr(pair[1], "rich_help_panel", None)
        return name if isinstance(name, str) else default

    pairs = [*named]
    order = [*dict.fromkeys(map(panel, pairs))]
    order.sort(key=lambda each: each == default)
    ordered = sorted(pairs, key=lambda each: order.index(panel(each)))
    for name, found in groupby(ordered, panel):
        yield name, [*found]


def _write_sections(sections: dict[str, list[tuple[str, str]]], formatter: Any) -> None:
    """Writes names and texts in columns of one width."""
    lengths = [len(name) for rows in sections.values() for name, _ in rows]
    width = min(max(lengths), NAME_WIDTH)
    for title, rows in sections.items():
        if rows:
            with formatter.section(typer.style(title, bold=True)):
                formatter.write_dl([(name.ljust(width), text) for name, text in rows], width)


def _names(param: Any, ctx: Any) -> str:
    """Returns the names and the value: `-n, --lines N`, `--[no-]page`, `[PROCESS]...`."""
    if _is_argument(param):
        return _usage(param)
    names = sorted(param.opts, key=len)
    if param.secondary_opts:
        names = [f"--[no-]{each.removeprefix('--')}" for each in names if each.startswith("--")]
    shown = ", ".join(names)
    return shown if param.is_flag else f"{shown} {_value(param, ctx)}"


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _usage(argument: Any) -> str:
    """Returns an argument as it is typed: `NAME`, `[NAME]`, `[NAME]...`."""
    name = str(argument.metavar or argument.name.upper())
    if name.startswith("[") or name.endswith("..."):
        return name
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def _value(param: Any, ctx: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    described = getattr(param, "display_type", None) or param.make_metavar  # by typer's version
    shown = re.sub(r"^list\[(.*)\]$", r"\1", str(described(ctx)).strip("<>"))
    if param.opts[0].endswith("-s"):
        return "SECONDS"
    return _TYPES.get(shown.lower(), shown)


def _text(param: Any, ctx: Any, *, shows_variables: bool) -> str:
    text = " ".join((getattr(param, "help", None) or "").split())
    notes = ["required"] if param.required and not _is_argument(param) else []
    default = "" if param.required or "(default:" in text else _default(param, ctx)
    if default:
        notes.append(f"default: {default}")
    if shows_variables and param.envvar:
        notes.append(f"env: {param.envvar}")
    return f"{text} [{'; '.join(notes)}]" if notes else text


def _default(param: Any, ctx: Any) -> str:
    """Returns the default of an option, or "" if it has none or its text says it."""
    if isinstance(param.show_default, str):
        return param.show_default
    found = param.get_default(ctx, call=False)
    if not param.show_default or found is None or callable(found) or found in ("", (), []):
        return ""
    if param.is_flag:
        return ("on" if found else "off") if param.secondary_opts else ""
    if isinstance(found, float):
        return f"{found:g}"
    return str(found.value) if isinstance(found, Enum) else str(found)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


def _write_epilog(epilog: str, formatter: Any) -> None:
    """Writes `Examples:  A  ·  B` as a list, and other paragraphs as they are."""
    for paragraph in filter(None, epilog.split("\n\n")):
        found = re.fullmatch(r"(Examples?):  (.*)", paragraph, re.DOTALL)
        if found is None:
            formatter.write_paragraph()
            formatter.write_text(paragraph)
            continue
        with formatter.section(typer.style(found[1], bold=True)):
            for example in re.split(r"\s+·\s+", found[2]):
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")
