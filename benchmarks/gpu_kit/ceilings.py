"""The ceilings of known cards, for the rows of a run that has not measured its own card's.

`copy_bytes_s` counts the bytes that a copy reads and writes, `matmul_flops` the operations of a
BF16 product.
"""

from __future__ import annotations

from typing import Any

CEILINGS: dict[str, dict[str, float]] = {  # by a part of the card's name, measured on such cards
    "H100": {"copy_bytes_s": 3.0e12, "matmul_flops": 798e12},
    "H200": {"copy_bytes_s": 4.25e12, "matmul_flops": 795e12},
}
OF_DATASHEET = 0.88  # a copy's share of the bandwidth that clock and width of the memory give


def assumed(card: str, name: str) -> float | None:
    """Returns the ceiling of the card with this name; None for an unknown card."""
    for part, values in CEILINGS.items():
        if part in card:
            return values[name]
    return None


def copy_rate(properties: Any) -> float | None:
    """Returns the bytes per second that a copy should reach, by torch's properties of a device."""
    kilohertz = getattr(properties, "memory_clock_rate", None)
    bits = getattr(properties, "memory_bus_width", None)
    if not kilohertz or not bits:
        return None
    return OF_DATASHEET * 2 * kilohertz * 1e3 * bits / 8  # two transfers a clock
