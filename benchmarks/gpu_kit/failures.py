"""Exceptions of single cases as rows, so that the cases after them are still measured."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.gpu_kit.session import Session

MAX_MESSAGE = 500


@contextmanager
def recorded(session: Session, case: str, failed: list[str]) -> Iterator[None]:
    """Adds a row with what is raised inside, and the case to `failed`. Raises the
    device's own error if it is lost, as nothing can be measured after it.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        session.add(case=case, raised=f"{type(error).__name__}: {error}"[:MAX_MESSAGE])
        failed.append(case)
        session.synchronize()


@contextmanager
def unavailable_as_row(session: Session, case: str) -> Iterator[None]:
    """Adds a row with the reason if this machine lacks what the block needs."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:MAX_MESSAGE]
        session.add(case=case, status="unavailable", reason=reason)


def raise_for(failed: list[str]) -> None:
    """Raises RuntimeError if a case failed."""
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}")
