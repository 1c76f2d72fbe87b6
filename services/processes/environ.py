"""The environment of a child process: this copy of the packages, and its share of the cores."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import services

_ROOT = Path(services.__file__).resolve().parent.parent


def thread_environ(num_threads: int) -> dict[str, str]:
    """Limits math threads to the process's share of the cores, and keeps them from spinning."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


def python_path(environ: Mapping[str, str]) -> str:
    """Returns a PYTHONPATH with this copy of the packages, installed or not."""
    inherited = environ.get("PYTHONPATH")
    return str(_ROOT) if not inherited else f"{_ROOT}:{inherited}"
