"""Norms and gates of rows, of the width of the model's hidden states and of its MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gpu_kit.cases.case import EPS, Build, Case
from benchmarks.gpu_kit.session import Session

NUM_ROWS = 64


def rms_norm(session: Session) -> Case:
    from kernels.gpu.rows.rms_norm import rms_norm as launch
    from kernels.reference.rms_norm import rms_norm as reference

    x = session.random(NUM_ROWS, session.shapes.hidden)
    weight = session.random(session.shapes.hidden, seed=1)
    return Case(
        ("rms_norm",),
        lambda: launch(x, weight, EPS),
        lambda: reference(x.float(), weight.float(), EPS),
    )


def add_rms_norm(session: Session) -> Case:
    """The norm and the sum, one below the other."""
    from kernels.gpu.rows.add_rms_norm import add_rms_norm as launch
    from kernels.reference.add_rms_norm import add_rms_norm as reference

    hidden = session.shapes.hidden
    x, residual = (session.random(NUM_ROWS, hidden, seed=seed) for seed in (0, 1))
    weight = session.random(hidden, seed=2)
    return Case(
        ("add_rms_norm",),
        lambda: torch.cat(launch(x, residual, weight, EPS)),
        lambda: torch.cat(reference(x.float(), residual.float(), weight.float(), EPS)),
    )


def silu_and_mul(session: Session) -> Case:
    from kernels.gpu.rows.silu_and_mul import silu_and_mul as launch
    from kernels.reference.gated import silu_and_mul as reference

    return _gate(session, launch, reference)


def gelu_and_mul(session: Session) -> Case:
    from kernels.gpu.rows.gelu_and_mul import gelu_and_mul as launch
    from kernels.reference.gated import gelu_and_mul as reference

    return _gate(session, launch, reference)


def _gate(
    session: Session, launch: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor]
) -> Case:
    gate_up = session.random(NUM_ROWS, 2 * session.shapes.inner)
    return Case((launch.__name__,), lambda: launch(gate_up), lambda: reference(gate_up.float()))


CASES: dict[str, Build] = {
    each.__name__: each for each in (rms_norm, add_rms_norm, silu_and_mul, gelu_and_mul)
}
