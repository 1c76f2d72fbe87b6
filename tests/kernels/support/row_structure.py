"""The properties of a compiled kernel that determine the bits of a row's sums, from its TTGIR.

A sum's rounding depends on the order of its additions: how many elements of the summed axis a
thread has, over how many threads and warps the axis is spread, and how much of K a tensor-core
instruction adds. A product over more of K is a chain of such instructions over rising k, so that
its length does not affect the sum, nor does the layout of the other axis, of other rows or columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tests.support.kernels.fake_driver import Compiled

LAYOUT = re.compile(r"^(#\w+) = (#.*)$", re.MULTILINE)
REDUCTION = re.compile(
    r'"tt\.(reduce|scan)"\(.*?<\{axis = (\d+) : i32.*?\}> '
    r"\(\{(.*?)\}\)(?: \{.*?\})? : \((.*?)\) ->",
    re.DOTALL,
)
DOT = re.compile(r"(tt\.dot|ttng\.warp_group_dot) .*? : (.*?) \* (.*?) -> (tensor<.*?>)(?: loc|\n)")
TENSOR = re.compile(r"(?:tensor|memdesc)<((?:\d+x)+)(\w+), (.*)>$")


def structure(kernel: Compiled) -> frozenset[str]:
    """Equal for two variants of a kernel whose rows have the same bits."""
    layouts = dict(LAYOUT.findall(kernel.code))
    fusion = f"multiplications and additions are fused: {kernel.options.enable_fp_fusion}"
    return frozenset([fusion, *_sums(kernel.code, layouts), *_dots(kernel.code, layouts)])


def differing(kernels: Iterable[Compiled]) -> dict[str, set[frozenset[str]]]:
    """The kernels, by name, that have two variants with different structures."""
    found: dict[str, set[frozenset[str]]] = {}
    for kernel in kernels:
        found.setdefault(kernel.name, set()).add(structure(kernel))
    return {name: variants for name, variants in found.items() if len(variants) > 1}


def _sums(code: str, layouts: dict[str, str]) -> Iterator[str]:
    """Skips maxima and sums of integers, which are the same in every order."""
    for kind, axis, body, operands in REDUCTION.findall(code):
        if "arith.addf" in body:
            yield f"{kind} of {_along(operands, int(axis), layouts)}"


def _dots(code: str, layouts: dict[str, str]) -> Iterator[str]:
    for name, left, _, out in DOT.findall(code):
        _, dtype, _ = _tensor(left)
        layout = layouts.get(_tensor(out)[2], _tensor(out)[2])
        version = re.search(r"versionMajor = \d+", layout)
        shape = re.search(r"instrShape = \[([^\]]*)\]", layout)
        instruction = shape and shape[1].split(",")[-1].strip()
        yield f"{name} of {dtype}, {version and version[0]}, step {instruction}"


def _tensor(text: str) -> tuple[list[int], str, str]:
    """Sizes, element type and the layout as text."""
    found = TENSOR.search(text.strip())
    assert found, text
    return [int(size) for size in found[1].split("x") if size], found[2], found[3]


def _along(operand: str, axis: int, layouts: dict[str, str]) -> str:
    sizes, dtype, layout = _tensor(operand.split(">, tensor<")[0])
    return f"{sizes[axis]} x {dtype}: {_layout_along(layout, axis, layouts)}"


def _layout_along(layout: str, axis: int, layouts: dict[str, str]) -> str:
    layout = layouts.get(layout, layout)
    if sliced := re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", layout):
        outer = axis if axis < int(sliced[1]) else axis + 1
        return _layout_along(sliced[2], outer, layouts)
    if not layout.startswith(("#ttg.blocked", "#ttg.nvidia_mma")):
        return layout
    fields = re.findall(r"(\w+) = \[([^\]]*)\]", layout)
    return ", ".join(
        f"{name} {values.split(',')[axis].strip()}"
        for name, values in fields
        if name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
    )
