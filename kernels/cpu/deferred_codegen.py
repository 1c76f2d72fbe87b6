"""Generates machine code once for each function that Python calls, together with its callees.

numba optimises each function and generates its code, links a copy into every caller, and does both
again there: the innermost functions of a layer seven times, most of the time of a first start.
`defer_codegen` leaves only the last time. The instructions have the same order of roundings.

For a process that only fills the cache: a function that another compiled function has called must
not be called from Python afterwards, since it has no code of its own. numba's internals change:
if the process fails, `warm.py` compiles without this module.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from numba.core import event, ir_utils
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.registry import cpu_target

_LOOP_BODY = "__numba_parfor_gufunc"  # numba's name of the function that a prange becomes
_NO_CODE = 0


class _Nesting(event.Listener):  # type: ignore[misc]
    """Counts the functions that are being compiled: more than one is a call of the first."""

    depth = 0

    def on_start(self, started: Any) -> None:
        self.depth += 1

    def on_end(self, ended: Any) -> None:
        self.depth -= 1


_nesting = _Nesting()


class DeferredLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A function's LLVM code and that of its callees. It is optimised when Python needs the
    function's address.
    """

    has_code = False

    def finalize(self) -> None:
        for library in dict.fromkeys(self._linking_libraries):
            self._reload_init.update(library._reload_init)
            self._final_module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        if _nesting.depth > 1 or _LOOP_BODY in self.name:
            return _NO_CODE
        if not self.has_code:
            self._optimize_final_module()
            self._final_module.verify()
            self._finalize_final_module()
        return int(super().get_pointer_to_function(name))

    def _finalize_specific(self) -> None:
        super()._finalize_specific()
        self.has_code = True


class DeferredCodegen(JITCPUCodegen):  # type: ignore[misc]
    _library_class = DeferredLibrary

    def set_env(self, env_name: str, env: Any) -> None:
        if self._engine.is_symbol_defined(env_name):
            super().set_env(env_name, env)


class _CopiesOfSets:
    """Stands for the module `copy` in numba's analysis, which in each round of an iteration copies
    dicts of sets. Copies of their elements, pairs of names, take a fifth of a compilation.
    """

    copy = staticmethod(copy.copy)

    @staticmethod
    def deepcopy(sets: Mapping[Any, set[Any]]) -> dict[Any, set[Any]]:
        return {key: set(values) for key, values in sets.items()}


def defer_codegen() -> None:
    """Affects all functions that this process compiles from now on."""
    ir_utils.copy = _CopiesOfSets
    event.register("numba:compile", _nesting)
    cpu_target.target_context.codegen().__class__ = DeferredCodegen
