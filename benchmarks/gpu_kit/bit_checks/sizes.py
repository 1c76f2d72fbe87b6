"""The numbers of rows and tokens in comparisons of bits; they are small if nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu_kit.session import Session


@dataclass(frozen=True)
class Sizes:
    many_rows: int  # computed together, all that a batch has
    num_rows: tuple[int, ...]  # computed alone: the first and the last ones
    prompt: int  # tokens
    chunks: tuple[int, ...]


FULL = Sizes(512, (1, 2, 8, 16, 64), 2100, (64, 7, 512))  # a prompt of three segments
SMALL = Sizes(32, (1, 16), 40, (16, 7))


def sizes_of(session: Session) -> Sizes:
    return SMALL if session.mode == "dry" else FULL
