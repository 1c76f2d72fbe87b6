"""Where pip gets packages on this machine, for builds of images on it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.containers.engine import own_limits

_LINE = re.compile(r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", re.MULTILINE)
_PATH = re.compile(r"(?:file://)?(/[^\s']+)")


def build_options(folder: Path) -> list[str]:
    """Returns options of `podman build` that mount pip's settings, which are written to `folder`,
    and the local files that they name.
    """
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = dict(_LINE.findall(found))
    conf = folder / "pip.conf"
    conf.write_text("[global]\n" + "".join(f"{k} = {v}\n" for k, v in settings.items()))
    named = {each for text in settings.values() for each in _PATH.findall(text)}
    found_paths = {_mounted(Path(each)) for each in named if Path(each).exists()}
    paths = {"/etc/pip.conf": conf} | {str(each): each for each in found_paths}
    volumes = [f"--volume={source}:{target}:ro" for target, source in paths.items()]
    limits = [f"--ulimit={each}" for each in own_limits()]
    return ["--network=host", *limits, *volumes]


def _mounted(path: Path) -> Path:
    """Returns a file itself, and the parent of a folder: an index's files may be beside it."""
    return path.parent if path.is_dir() and path.parent != Path("/") else path
