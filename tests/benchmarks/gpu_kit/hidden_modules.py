"""Hides installed packages that are neither in the reference image nor carried to it.

With the folder `as_image` in PYTHONPATH this holds in a process and those that it starts.
"""

from __future__ import annotations

import re
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, packages_distributions
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
IMAGE = ROOT / "benchmarks" / "gpu_kit" / "reference_image.txt"
WHEELS = ROOT / "benchmarks" / "gpu_pack" / "wheels.txt"
OWN = "hearth-serve"


def names_in(file: Path) -> set[str]:
    """The packages of a list, by their normalised names."""
    lines = (line.partition("#")[0].strip() for line in file.read_text().splitlines())
    return {normalised(re.split(r"[<>=!~\[; ]", line)[0]) for line in lines if line}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def present() -> set[str]:
    """The packages of the image, the wheels and this project."""
    return names_in(IMAGE) | names_in(WHEELS) | {OWN}


class Filtered:
    """Another finder, which finds no hidden module and no hidden package."""

    def __init__(self, finder: Any, modules: set[str], packages: set[str]) -> None:
        self._finder, self._hidden, self._present = finder, modules, packages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *arguments: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in self._hidden:
            return None
        found: ModuleSpec | None = self._finder.find_spec(name, *arguments)
        return found

    def find_distributions(self, *arguments: Any) -> list[Distribution]:
        find = getattr(self._finder, "find_distributions", lambda *_: ())
        return [each for each in find(*arguments) if normalised(each.name) in self._present]


def hide() -> None:
    """Hides the modules of installed packages that are not present."""
    packages = present()
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if packages.isdisjoint(map(normalised, owners))
    }
    sys.meta_path[:] = [Filtered(finder, hidden, packages) for finder in sys.meta_path]
