"""The instructions that decode weights on a GPU, emulated here one by one: Triton's interpreter
cannot run them, and evaluates a formula instead.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import or_

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("triton")

from kernels.gpu.gemm.split_tile import FIRST_HALF, SECOND_HALF

Words = NDArray[np.uint32]


def _permuted(low: Words, high: Words, selector: Words) -> Words:
    """prmt: each of four selectors picks one of eight bytes."""
    both = low.astype(np.uint64) | high.astype(np.uint64) << 32
    picked = [
        (both >> np.uint64(8 * (int(selector) >> 4 * i & 7)) & 0xFF) << 8 * i for i in range(4)
    ]
    return reduce(or_, picked).astype(np.uint32)


def _looked_up(a: Words, b: Words, c: Words, table: Words) -> Words:
    """lop3: bit i of the table is the result where the bits of a, b and c are those of i."""
    cases = [
        (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        for i in range(8)
        if int(table) >> i & 1
    ]
    return reduce(or_, cases)


OPERATIONS = {
    "prmt.b32": _permuted,
    "lop3.b32": _looked_up,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
}


def _run(code: str, arguments: list[Words]) -> tuple[Words, Words]:
    registers = {f"${2 + index}": each for index, each in enumerate(arguments)}
    for line in re.findall(r"^(\w[\w.]+ [^;]+);", code, re.MULTILINE):
        name, _, operands = line.partition(" ")
        target, *sources = (each.strip() for each in operands.split(","))
        values = [
            registers[each] if each in registers else np.uint32(int(each, 0)) for each in sources
        ]
        registers[target] = OPERATIONS[name](*values)
    return registers["$0"], registers["$1"]


def _packed(elements: NDArray[np.uint32], bits: int) -> Words:
    """[n, 32 / bits] elements, the first in the lowest bits."""
    shifts = np.arange(elements.shape[1], dtype=np.uint32) * bits
    return np.bitwise_or.reduce(elements.astype(np.uint32) << shifts, axis=1)


@pytest.mark.parametrize("is_second", [False, True])
def test_instructions_decode_weights(is_second: bool) -> None:
    """Every code with every base, each next to random ones."""
    rng = np.random.default_rng(0)
    codes, bases = (each.ravel() for each in np.meshgrid(np.arange(256), np.arange(256)))
    num = len(codes)
    own = rng.integers(0, 256, (4, num, 4), dtype=np.uint32)
    rest, lower, upper, code = own
    place = np.arange(num) % 4
    code[np.arange(num), place] = codes
    base = np.repeat(bases[:, None], 4, axis=1).astype(np.uint32)
    shift = 4 if is_second else 0
    lower = lower & (0xF0 >> shift) | (code & 15) << shift
    upper = upper & (0xF0 >> shift) | (code >> 4) << shift
    arguments = [_packed(each, 8) for each in (rest, lower, upper)]
    arguments += [_packed(base[:, half] << 7, 16) for half in (slice(0, 2), slice(2, 4))]
    exponent = (base + code) & 0xFF
    weight = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    first, second = _run(SECOND_HALF if is_second else FIRST_HALF, arguments)
    np.testing.assert_array_equal(first, _packed(weight[:, :2], 16))
    np.testing.assert_array_equal(second, _packed(weight[:, 2:], 16))
