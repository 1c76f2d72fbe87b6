"""Children that compile CPU kernels by fork: a template has imported torch, numba and the kernels.

A plan has two children, whose imports take 1.6 s of CPU time each; most find their code in the
cache, which other plans have filled.
"""

from __future__ import annotations

import json
import os
import pkgutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kernels.cpu
from tests.support.cluster.process_template import ForkedProcess, ProcessTemplate, serve

MODULE = "tests.support.kernels.compile_template"
CALL = "call"


@contextmanager
def forked_compilers() -> Iterator[None]:
    """Inside, `kernels.cpu.warm` forks the children that fill the cache of this run."""
    from kernels.cpu import warm
    from kernels.cpu.compile import cache_dir

    start, own_cache = warm._start, cache_dir()

    def start_forked(plan: Any, part: str, mode: Any, niceness: int = 0) -> Any:
        if cache_dir() != own_cache:
            return start(plan, part, mode, niceness)  # type: ignore[arg-type]
        arguments = part, mode, json.dumps(asdict(plan)), str(niceness)
        return CompilingChild(_template(own_cache), arguments, _environ(own_cache))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "_start", start_forked)
        yield


def compile_in_child(run: Callable[[], object]) -> None:
    """Compiles what a function of a module calls, each of which no other function there has called
    (see `kernels.cpu.deferred_codegen`): half of the time that it would take this process.
    """
    from kernels.cpu.compile import cache_dir, compile_lock

    with compile_lock():
        child = CompilingChild(
            _template(cache_dir()),
            (CALL, run.__module__, run.__qualname__),
            _environ(cache_dir()),
        )
        _, errors = child.communicate()
    assert child.returncode == 0, errors


@cache
def _template(cache: str) -> ProcessTemplate:
    return ProcessTemplate(MODULE, _environ(cache))


def _environ(cache: str) -> dict[str, str]:
    """Returns variables for the template and its children: numba reads them again if they
    changed.
    """
    return {"NUMBA_CACHE_DIR": cache, "NUMBA_NUM_THREADS": "1"}


class CompilingChild(ForkedProcess):
    """A forked process with the part of `subprocess.Popen`'s interface that `kernels.cpu.warm`
    uses.
    """

    def __init__(
        self, template: ProcessTemplate, arguments: Sequence[str], environ: Mapping[str, str]
    ) -> None:
        number, path = tempfile.mkstemp()
        os.close(number)
        self._errors, environ = Path(path), {**os.environ, **environ}
        super().__init__(template, template.start(arguments, environ, self._errors).pid)

    def communicate(self, timeout: float | None = None) -> tuple[None, str]:
        """Raises TimeoutExpired."""
        self.wait(timeout)
        errors = self._errors.read_text()
        self._errors.unlink()
        return None, errors


# ── in the template ──────────────────────────────────────────────────────────────────────────────


def main() -> None:
    for each in pkgutil.walk_packages(kernels.cpu.__path__, "kernels.cpu."):
        import_module(each.name)
    serve(_compile)


def _compile(arguments: Sequence[str]) -> None:
    import numba
    import torch

    from kernels.cpu import warm_parts
    from kernels.cpu.compile_plan import CompilePlan
    from kernels.cpu.deferred_codegen import defer_codegen

    torch.set_num_threads(1)
    numba.set_num_threads(1)
    if arguments[0] == CALL:
        defer_codegen()
        getattr(import_module(arguments[1]), arguments[2])()
        return
    part, mode, plan, niceness = arguments
    os.nice(int(niceness))
    warm_parts.main(part, mode, CompilePlan(**json.loads(plan)))


if __name__ == "__main__":
    main()
