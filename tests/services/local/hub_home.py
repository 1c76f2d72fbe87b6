"""A folder for HF_HOME with one cached model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MODEL = "org/tiny-1.5"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_hub_home(home: Path, model_dir: Path) -> Path:
    """Writes the files of `model_dir` in huggingface_hub's layout: names are links to blobs."""
    repository = home / "hub" / f"models--{MODEL.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (repository / "blobs", repository / "refs", snapshot):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, source in enumerate(sorted(model_dir.iterdir())):
        blob = repository / "blobs" / f"{number:064x}"
        shutil.copy(source, blob)
        (snapshot / source.name).symlink_to(os.path.relpath(blob, snapshot))
    return home


def offline(home: Path) -> dict[str, str]:
    """The variables of a process that has this folder and no hub."""
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
