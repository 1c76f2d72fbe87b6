"""All Triton kernels: launches at the shapes of real models, their references, and how results
compare with them. The operations that most others depend on come first.
"""

from __future__ import annotations

from tests.support.kernels.cases import attention, experts, kv, products, rows, sampling
from tests.support.kernels.cases.case import Case

CASES = [*products.CASES, *experts.CASES, *attention.CASES, *rows.CASES, *kv.CASES, *sampling.CASES]


def samples() -> list[Case]:
    """Returns the first case of each function."""
    found: dict[object, Case] = {}
    for case in CASES:
        found.setdefault(case.function, case)
    return list(found.values())
