"""Changes to Triton's interpreter: faster launches, and sums in the same order on every CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from inspect import ismodule
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once_per_launch() -> None:
    """Patches each language module once per launch.

    Triton patches them again for each call of a device function, which took 40 % of its time. Does
    nothing with releases of Triton whose patches are not undone.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch_lang = interpreter._patch_lang
    patched: set[int] = set()  # modules that the launch that runs now has patched

    def patch_once(function: Any) -> Any:
        is_launch = not patched
        modules = _language_modules(function)
        if modules <= patched:
            return None  # a device function's scope is not used
        scope = patch_lang(function)
        patched.update(modules)
        if is_launch:
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        return scope

    interpreter._patch_lang = patch_once


@cache
def _language_modules(function: Callable[..., Any]) -> frozenset[int]:
    values = [each for each in function.__globals__.values() if ismodule(each)]
    return frozenset(id(each) for each in values if each in (tl, tl.core))


def skip_unused_work() -> None:
    """Computes no overflow of an addition, which only a run with TRITON_DEBUG asserts, and looks a
    dtype up once: a third of the time.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    look_up = interpreter._get_np_dtype
    known = cache(look_up)

    def np_dtype(dtype: Any) -> Any:
        return known(dtype.scalar) if type(dtype.scalar) is tl.dtype else look_up(dtype)

    interpreter._get_np_dtype = np_dtype


def sum_dots_in_order() -> None:
    """Makes `tl.dot` add its products in the order of the inner index, as a GPU does for any tile.

    Triton calls NumPy's BLAS, whose order depends on the CPU and on the number of rows, so that
    tests of batch invariance fail on some machines.
    """

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> interpreter.TensorHandle:
        return interpreter.TensorHandle(dot_in_order(a.data, b.data, d.data), d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def dot_in_order(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> np.ndarray:
    """a [..., M, K] · b [..., K, N] + d, in the dtype of `d`; each element one chain over K.

    `einsum` takes the contiguous index of `b`, N, as its inner loop.
    """
    left, right = a.astype(d.dtype), np.ascontiguousarray(b, d.dtype)
    return np.einsum("...mk,...kn->...mn", left, right, optimize=False) + d
