"""The environment of a child process: its share of the cores."""

from __future__ import annotations


def thread_environ(num_threads: int) -> dict[str, str]:
    """Limits math threads to the process's share of the cores, and keeps them from spinning."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
