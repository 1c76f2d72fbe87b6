"""Changes to Triton's interpreter: faster launches, and sums in the same order on every CPU."""

from __future__ import annotations

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
        modules = {
            id(value)
            for value in function.__globals__.values()
            if ismodule(value) and value in (tl, tl.core)
        }
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


def sum_dots_in_order() -> None:
    """Makes `tl.dot` add its products in the order of the inner index, as a GPU does for any tile.

    Triton calls NumPy's BLAS, whose order depends on the CPU and on the number of rows, so that
    tests of batch invariance fail on some machines.
    """

    def create_dot(_: Any, a: Any, b: Any, d: Any, *options: Any) -> interpreter.TensorHandle:
        dtype = d.data.dtype
        products = a.data.astype(dtype)[..., :, :, None] * b.data.astype(dtype)[..., None, :, :]
        return interpreter.TensorHandle(np.add.reduce(products, axis=-2) + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
