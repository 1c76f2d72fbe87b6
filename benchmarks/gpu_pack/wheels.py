"""The wheels that travel: packages that the reference image lacks, for its Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIST = Path(__file__).with_name("wheels.txt")
PLATFORMS = (
    "manylinux_2_31",
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_17",
    "manylinux2014",
)  # of glibc
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def download(folder: Path) -> None:
    """Replaces the folder. Raises subprocess.CalledProcessError."""
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    for platform in PLATFORMS:
        options += ["--platform", f"{platform}_x86_64"]
    _run([*PIP, "download", *options, "--python-version", "3.12", "--dest", folder, "-r", LIST])


def install(wheels: Path, folder: Path) -> None:
    """Installs them without a network, as on the machine that they travel to."""
    options = ("--quiet", "--no-index", "--no-deps", "--target", folder)
    _run([*PIP, "install", *options, *sorted(wheels.glob("*.whl"))])


def _run(command: Sequence[str | Path]) -> None:
    subprocess.run(command, check=True)
