"""`hearth version`."""

from __future__ import annotations

import typer

from services.cli.options import OPERATE
from shared.errors import ConfigError
from shared.lifecycle.release import NOT_INSTALLED, installed_release

app = typer.Typer()


@app.command(rich_help_panel=OPERATE, epilog="Example:  hearth version")
def version() -> None:
    """Print the version."""
    release = installed_release()
    if release == NOT_INSTALLED:
        raise ConfigError("no version: hearth runs from a tree that is not installed")
    print(release)
