"""All first cases, the operations that most others depend on first."""

from __future__ import annotations

from tests.kernels.gpu.first import attention, experts, kv, products, rows, sampling
from tests.kernels.gpu.first.case import Case

CASES = [*products.CASES, *experts.CASES, *attention.CASES, *rows.CASES, *kv.CASES, *sampling.CASES]


def samples() -> list[Case]:
    """The first case of each function."""
    found: dict[object, Case] = {}
    for case in CASES:
        found.setdefault(case.function, case)
    return list(found.values())
