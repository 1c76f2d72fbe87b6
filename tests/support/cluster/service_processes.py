"""Service processes that serve the demo model on this machine, each started by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from services.cli.cluster.service_options import DEMO_MODEL_DIR, DEMO_MODEL_NAME
from services.local.processes.environ import thread_environ

ROOT = Path(__file__).resolve().parents[3]
OPERATOR_TOKEN = "of-the-operator"  # shows the names of processes
OPERATOR = {"authorization": f"Bearer {OPERATOR_TOKEN}"}
MODEL = ("--model-dir", str(DEMO_MODEL_DIR), "--model-name", DEMO_MODEL_NAME)


def start_python(
    arguments: Sequence[str], environ: Mapping[str, str], log_path: Path
) -> subprocess.Popen[bytes]:
    """Starts `python ARGUMENTS` with one compute thread, and with no variable of Hearth that is not
    in `environ`. The log is appended to.
    """
    with log_path.open("ab") as log_file:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=process_environ(environ),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
        )


def process_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of `start_python`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    return {**clean, **thread_environ(1), "PYTHONPATH": str(ROOT), **environ}


async def known_processes(http: httpx.AsyncClient, url: str) -> set[str]:
    """Returns the processes that the gateway at `url` knows, without itself; none while it does not
    accept requests. `http` has the headers of `OPERATOR`.
    """
    try:
        response = await http.get(f"{url}/ready")
    except httpx.HTTPError:
        return set()
    if response.status_code != 200:
        return set()
    body = response.json()
    workers = body["workers"]
    encode = workers.get("encode", ())
    return {*encode, *workers["prefill"], *workers["decode"], *body["scheduler"], *body["kv_index"]}
