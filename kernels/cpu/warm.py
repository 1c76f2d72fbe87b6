"""Compiles what a model will run, in child processes, before the model is loaded.

    attention   attention, norms, and the KV codec          } concurrently: each fills the
    layers      decoder layers by columns, output head      } cache, the caller loads the code
    rows        decoder layers by rows: after the worker is ready, at low priority

Children generate code once an operation (see deferred_codegen.py), or, if that fails, once a
function. If that fails too, the host cannot compile (see probe.py), and the library serves instead.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

from kernels.cpu import probe
from kernels.cpu.compile import compile_lock, start_child
from kernels.cpu.compile_plan import CompilePlan, Part
from kernels.cpu.warm_parts import compile_layers_by_rows

Mode = Literal["deferred", "immediate"]  # immediate: as numba does it
LOW_PRIORITY = 19
_PARTS: tuple[Part, ...] = ("layers", "attention")


def compile_ahead(plan: CompilePlan) -> str | None:
    """Waits until the machine code is in the cache. Returns why it cannot be compiled, or None.

    One process of a host compiles, the others wait for it.
    """
    if probe.lacks_fma():
        return probe.failure()
    try:
        if _missing_parts(plan):
            with compile_lock():
                _compile_in_children(plan, _missing_parts(plan))
    except OSError as error:
        return f"no cache for machine code: {error}"
    return probe.failure()


def is_compiled(plan: CompilePlan) -> bool:
    return not _missing_parts(plan)


def _missing_parts(plan: CompilePlan) -> list[Part]:
    return [part for part in _PARTS if not plan.marker(part).exists()]


def _compile_in_children(plan: CompilePlan, parts: Sequence[Part]) -> None:
    if not parts or probe.known_failure() is not None:
        return
    status, errors = in_modes(lambda mode: _run_children(plan, parts, mode))
    probe.record(status, errors)
    if status == 0:
        for part in parts:
            plan.marker(part).touch()


def in_modes(run: Callable[[Mode], tuple[int, str]]) -> tuple[int, str]:
    """Runs children in the fast mode, and in numba's own if that fails for a reason of its own.

    Returns the last exit status and its errors.
    """
    status, errors = run("deferred")
    if status == 0 or probe.is_from_outside(status):
        return status, errors
    return run("immediate")


def _run_children(plan: CompilePlan, parts: Sequence[Part], mode: Mode) -> tuple[int, str]:
    """The exit status and errors of the first child that failed; 0 if none did."""
    children = [_start(plan, part, mode) for part in parts]
    endings = [(child.communicate()[1], child.returncode) for child in children]
    failed = [(status, errors) for errors, status in endings if status != 0]
    return failed[0] if failed else (0, "")


def _start(plan: CompilePlan, part: Part, mode: Mode, niceness: int = 0) -> subprocess.Popen[str]:
    described = json.dumps(asdict(plan))
    return start_child("kernels.cpu.warm_parts", part, mode, described, niceness=niceness)


def compile_rows(plan: CompilePlan, is_wanted: Callable[[], bool]) -> None:
    """Compiles layers by rows at low priority and loads the code: until then long prompts are
    computed by columns, with the same bits. Stops early if `is_wanted` returns False.
    """
    if not plan.is_blocked or probe.failure() is not None:
        return
    marker = plan.marker("rows")
    if not marker.exists():
        in_modes(lambda mode: _compile_rows_in_child(plan, mode, is_wanted))
    if marker.exists() and is_wanted():
        compile_layers_by_rows(plan)


def _compile_rows_in_child(
    plan: CompilePlan, mode: Mode, is_wanted: Callable[[], bool]
) -> tuple[int, str]:
    child, errors = _start(plan, "rows", mode, LOW_PRIORITY), ""
    while child.poll() is None:
        if not is_wanted():
            child.kill()
        with suppress(subprocess.TimeoutExpired):
            errors = child.communicate(timeout=0.2)[1]
    return child.returncode, errors
