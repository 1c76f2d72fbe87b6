"""Whether a row's bits depend on the other rows, on chunks, and on the form of the weights.

Many rows are computed together, and the first and last M of them alone: a row must be identical to
the last bit. So must a context that is computed in chunks, a split weight's product compared with
the dense one's, and the logits of a model of two layers. `exact` of the verdict is what a worker
guarantees by default, and whether this device satisfies it. Its first row says that the part runs;
the second comes once a dense model's operations are known; the last one is final.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu_kit.bit_checks import batch_ops, contexts, small_model, split_weights
from benchmarks.gpu_kit.bit_checks.sizes import sizes_of
from benchmarks.gpu_kit.bit_checks.verdict import State, Verdict
from benchmarks.gpu_kit.failures import recorded
from benchmarks.gpu_kit.operands import products
from benchmarks.gpu_kit.session import Session

Check = Callable[[Verdict], None]


def run(session: Session) -> None:
    judge(session, MAIN, OTHERS)
    if not session.is_dry:
        compare_library(session)


def judge(session: Session, main: Mapping[str, Check], others: Mapping[str, Check]) -> None:
    """Raises RuntimeError unless all bits are equal."""
    verdict = Verdict(session)
    verdict.add("running")
    stages: tuple[tuple[State, Mapping[str, Check]], ...] = (("main", main), ("final", others))
    for state, checks in stages:
        for name, check in checks.items():
            with recorded(session, name, verdict.raised):
                check(verdict)
        verdict.add(state)
    verdict.raise_unless_exact()


def rows_alone(name: str, build: batch_ops.Build) -> Check:
    def check(verdict: Verdict) -> None:
        compare_rows(verdict, name, build(verdict.session))

    return check


def compare_rows(verdict: Verdict, name: str, op: batch_ops.RowOp) -> None:
    session, sizes = verdict.session, sizes_of(verdict.session)
    together = op.of(slice(0, sizes.many_rows))
    if op.kernels and not session.is_dry:
        session.digest(f"{name}, {sizes.many_rows} rows", together, kernels=op.kernels)
    for num_rows in sizes.num_rows:
        first, last = slice(0, num_rows), slice(sizes.many_rows - num_rows, sizes.many_rows)
        verdict.compare(
            f"{name}, {num_rows} of {sizes.many_rows} rows",
            torch.cat([op.of(first), op.of(last)]),
            torch.cat([together[first], together[last]]),
            op.kernels,
        )


def compare_library(session: Session) -> None:
    """Rows for torch's default product, which promises nothing."""
    apart = Verdict(session)
    for product in ("qkv", "o", "gate_up", "down"):
        x, weight = products.operands(session, product, sizes_of(session).many_rows)
        op = batch_ops.RowOp((), lambda rows: torch.nn.functional.linear(x[rows], weight))  # noqa: B023
        compare_rows(apart, f"torch's product {product}", op)


MAIN: dict[str, Check] = {
    **{name: rows_alone(name, build) for name, build in batch_ops.MAIN.items()},
    "prefill": lambda verdict: contexts.compare(
        verdict, "prefill", contexts.heads_prompt(verdict.session)
    ),
}
OTHERS: dict[str, Check] = {
    "model of two layers": small_model.compare,
    **{name: rows_alone(name, build) for name, build in batch_ops.OTHERS.items()},
    "latent prefill": lambda verdict: contexts.compare(
        verdict, "latent prefill", contexts.latent_prompt(verdict.session)
    ),
    "split weights": split_weights.compare,
}
