"""The `hearth` command, the entry point of all processes.

It imports the modules of the command that is used: `services/command_table.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Iterable
from functools import cache
from typing import Annotated, Any, NoReturn

_ON_INTERRUPT = signal.getsignal(signal.SIGINT)
if _ON_INTERRUPT is signal.default_int_handler:  # no traceback of what is imported until then
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import typer

from services.cli.help import SETTINGS
from services.command_table import RootGroup
from shared.errors import ConfigError, HearthError
from shared.secrets.option_files import read_option_files

if _ON_INTERRUPT is signal.default_int_handler:
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, _ON_INTERRUPT)

# Typer bundles click or uses the installed one, by its version; this finds the one in use.
UsageError: Any = next(each for each in typer.BadParameter.__mro__ if each.__name__ == "UsageError")
VALIDATION_PREFIX = "Value error, "  # pydantic's, by which newer typers check values
MAX_SHOWN_CHARS = 64
FULL = (errno.ENOSPC, errno.EDQUOT)

app = typer.Typer(
    name="hearth",
    cls=RootGroup,
    context_settings=SETTINGS,
    help="Serve large language models from many small GPU sites as one system.",
    epilog="Start with: hearth up",
    rich_markup_mode=None,  # `services.cli.help`
    pretty_exceptions_enable=False,
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from services.cli.version_command import version

        version()
        raise typer.Exit


@app.callback()
def root(
    is_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Defines the options before a command."""


@cache
def _command() -> Any:
    return typer.main.get_command(app)


def main() -> None:
    """Reports an error as one line on standard error and exit status 2."""
    arguments = sys.argv[1:] or ["--help"]
    try:
        _check_encoding([*arguments, *_own_variables()])
        files = read_option_files(os.environ)
        status = _command().main(arguments, prog_name="hearth", standalone_mode=False, obj=files)
        _flush_output()
    except UsageError as error:
        _exit_with_error(f"{_problem(error)}: see `{_path(error)} --help`")
    except HearthError as error:
        _exit_with_error(error.message)
    except OSError as error:  # of a print: others name a file
        if error.filename or error.errno not in FULL:
            raise
        _discard_output()
        _exit_with_error(f"standard output: {error.strerror}")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(status or 0)


def _flush_output() -> None:
    """Writes what is left, so that the interpreter does not fail to at its end."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: nobody reads on
        _discard_output()


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _own_variables() -> Iterable[str]:
    return (value for name, value in os.environ.items() if name.startswith("HEARTH_"))


def _check_encoding(texts: Iterable[str]) -> None:
    """Raises ConfigError for bytes that are no UTF-8, which neither JSON nor a URL can hold."""
    for each in texts:
        try:
            each.encode()
        except UnicodeEncodeError:
            given = os.fsencode(each[:MAX_SHOWN_CHARS])
            raise ConfigError(f"an argument or a variable is not UTF-8: {given!r}") from None


def _problem(error: Any) -> str:
    return str(error.format_message()).replace(VALIDATION_PREFIX, "").rstrip(".")


def _path(error: Any) -> str:
    """Returns the command of which the usage is wrong."""
    return "hearth" if error.ctx is None else str(error.ctx.command_path)


def _exit_with_error(message: str) -> NoReturn:
    print(f"hearth: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
