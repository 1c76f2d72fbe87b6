"""The console for tables: as wide as the terminal, or PIPE_WIDTH without a terminal."""

from __future__ import annotations

import os

from rich.console import Console

PIPE_WIDTH = 160


def table_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPE_WIDTH
    return console
