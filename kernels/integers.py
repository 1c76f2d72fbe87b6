"""Arithmetic of sizes on the host. Triton's functions of these names also run inside kernels, and
cost a microsecond or two when Python calls them.
"""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """Returns the number of blocks that cover `size`."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """Returns the least power of two that is not below `size`, which is positive."""
    return 1 << (size - 1).bit_length()
