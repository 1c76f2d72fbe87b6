"""Unpacks the kernels that were compiled elsewhere, and says whether this machine finds them."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.gpu_kit.compiled.carried_cache import (
    ARCHIVE,
    MANIFEST,
    Manifest,
    differences,
    modules_error,
    software_of,
    unpack,
)
from benchmarks.gpu_kit.session import Session, Unavailable

DRY_CAPABILITY = 90  # the fake driver's


def run(session: Session, folder: str) -> None:
    """Adds a row on the kernels, with whose `differences` each part's must be compiled, and one on
    the C modules.
    """
    archive, manifest = Path(folder) / ARCHIVE, Path(folder) / MANIFEST
    if not archive.exists() or not manifest.exists():
        raise Unavailable(f"{folder} has no {ARCHIVE} or no {MANIFEST}: scripts/gpu_pack makes it")
    packed = Manifest.read(manifest)
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    unpack(archive, cache)
    found = differences(packed.software, software_of(_capability(session)))
    session.add(case="carried kernels", by_part=packed.kernels, differences=found)
    if not session.is_dry:
        session.add(case="carried modules", error=modules_error(cache))


def _capability(session: Session) -> int:
    if session.is_dry:
        return DRY_CAPABILITY
    session.need_device()
    import torch

    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor
