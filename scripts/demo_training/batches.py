"""Training batches: rows of one length as tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from demo_training.corpus import Corpus
from demo_training.rows import RowWriter
from demo_training.tool_dialogues import ToolCorpus

Content = Literal["chat", "tools", "copies"]


@dataclass(frozen=True)
class RowKind:
    """Rows of one length: T positions, B rows in a batch, and how often such a batch is drawn.

    The shares of a phase need not sum to 1.
    """

    length: int
    rows: int
    share: float
    content: Content = "chat"


SHORT_ROWS = (
    RowKind(length=32, rows=96, share=0.40),
    RowKind(length=112, rows=28, share=0.31),
    RowKind(length=256, rows=12, share=0.22),
    RowKind(length=1024, rows=2, share=0.07),
    RowKind(length=448, rows=8, share=1.2, content="tools"),
)
LONG_ROWS = (
    RowKind(length=32, rows=96, share=0.30),
    RowKind(length=112, rows=28, share=0.35),
    RowKind(length=512, rows=6, share=0.14),
    RowKind(length=2048, rows=2, share=0.12),
    RowKind(length=8192, rows=1, share=0.09),
    RowKind(length=448, rows=8, share=1.2, content="tools"),
)
# After a warm start: what the model knows is kept by fewer rows, what is new gets most of them.
# Arguments and names are copied from the prompt, which no answer to a question needs: rows that
# repeat themselves teach it.
WARM_ROWS = (
    RowKind(length=32, rows=96, share=0.08),
    RowKind(length=112, rows=28, share=0.12),
    RowKind(length=512, rows=6, share=0.03),
    RowKind(length=2048, rows=1, share=0.02),
    RowKind(length=8192, rows=1, share=0.03),  # without it the end of a long context is forgotten
    RowKind(length=96, rows=32, share=0.15, content="copies"),
    RowKind(length=144, rows=22, share=0.28, content="tools"),
    RowKind(length=448, rows=8, share=0.32, content="tools"),
)
LONG_PHASE = 0.8  # the part of the training after which LONG_ROWS are drawn


def row_kinds(step: int, steps: int) -> tuple[RowKind, ...]:
    """Returns the kinds of rows that a step draws from: long rows are slow, so they come late."""
    return SHORT_ROWS if step < LONG_PHASE * steps else LONG_ROWS


class Batches:
    """Draws training batches: rows of dialogue, cut to one length."""

    def __init__(self, corpus: Corpus, tools: ToolCorpus, tokenizer: Tokenizer, seed: int) -> None:
        self.rng = random.Random(seed)
        self.writer = RowWriter(corpus, tools, tokenizer, self.rng)

    def batch(self, kinds: tuple[RowKind, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns inputs [B, T], targets [B, T] and the loss weights [B, T] of the targets."""
        (kind,) = self.rng.choices(kinds, weights=[k.share for k in kinds])
        writer = self.writer
        write = {"chat": writer.row, "tools": writer.tool_row, "copies": writer.copy_row}[
            kind.content
        ]
        rows = [write(kind.length) for _ in range(kind.rows)]
        ids = torch.tensor([row.ids[: kind.length + 1] for row in rows])
        weights = torch.tensor([row.weights[: kind.length + 1] for row in rows])
        return ids[:, :-1], ids[:, 1:], weights[:, 1:]
