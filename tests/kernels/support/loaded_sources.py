"""A plugin of pytest: at the end it writes the project's files that the run imported, one a line.

The variable FILE names the file that is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

FILE = "HEARTH_LOADED_SOURCES"
ROOT = Path(__file__).parents[3]


def pytest_unconfigure() -> None:
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = [Path(each) for each in files if each and Path(each).is_relative_to(ROOT)]
    names = {str(each.relative_to(ROOT)) for each in paths if each.suffix == ".py"}
    own = (name for name in names if not name.startswith("."))  # not .venv
    Path(os.environ[FILE]).write_text("\n".join(sorted(own)))
