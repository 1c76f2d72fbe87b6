"""A training run, from random weights to the trained model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from demo_training.batches import WARM_ROWS, Batches, row_kinds
from demo_training.checkpoint import load_weights
from demo_training.corpus import Corpus
from demo_training.model import Llama, Shape
from demo_training.progress import progress_bar
from demo_training.tool_dialogues import ToolCorpus

SAVE_EVERY_S = 180.0


@dataclass(frozen=True)
class Recipe:
    """The parameters of a training run besides the corpus.

    With `minutes`, the run also ends after this time, and its learning rate falls accordingly; the
    result then depends on the speed of the machine. `start` is a checkpoint to begin with.
    """

    steps: int = 2000
    seed: int = 7
    dropout: float = 0.1
    matrix_rate: float = 4e-3
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    warm_up: int = 50
    minutes: float = math.inf
    start: Path | None = None


def learning_rate(step: int, part: float, recipe: Recipe) -> float:
    """Returns the factor of the learning rate: a linear rise, then half a cosine down to 1%.

    `part` is the part of the run, 0 to 1, that is over.
    """
    if step < recipe.warm_up:
        return (step + 1) / recipe.warm_up
    return 0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, part))) / 2


def make_optimizers(model: Llama, recipe: Recipe) -> list[Optimizer]:
    """Uses Muon for the matrices inside the layers, and AdamW for embeddings and norms."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [
        Muon(
            matrices,
            lr=recipe.matrix_rate,
            weight_decay=recipe.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        AdamW(others, lr=recipe.other_rate, betas=(0.9, 0.98), weight_decay=0.01),
    ]


class Descent:
    """Updates the weights of a model by gradient descent, at the learning rates of the recipe."""

    def __init__(self, model: Llama, recipe: Recipe) -> None:
        self.model = model
        self.optimizers = make_optimizers(model, recipe)
        self.part = 0.0  # part of the run that is over, 0 to 1
        self.schedules = [
            LambdaLR(optimizer, lambda step: learning_rate(step, self.part, recipe))
            for optimizer in self.optimizers
        ]

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> float:
        """Trains on inputs, targets and loss weights, each [B, T]; returns the loss before."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model.loss(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.item()


def train_model(
    corpus: Corpus,
    tools: ToolCorpus,
    tokenizer: Tokenizer,
    shape: Shape,
    recipe: Recipe,
    save: Callable[[Llama], None],
) -> Llama:
    """Trains a model, showing the loss on a progress bar; `save` is called every SAVE_EVERY_S."""
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    model = Llama(shape, recipe.dropout).train()
    if recipe.start is not None:
        load_weights(recipe.start, model)
    descent = Descent(model, recipe)
    batches = Batches(corpus, tools, tokenizer, recipe.seed)
    start = saved = time.monotonic()
    for step in progress_bar(recipe.steps):
        kinds = row_kinds(step.number, recipe.steps) if recipe.start is None else WARM_ROWS
        now = time.monotonic()
        descent.part = max(step.number / recipe.steps, (now - start) / 60 / recipe.minutes)
        if descent.part >= 1:
            break
        if now - saved > SAVE_EVERY_S:
            saved = now
            save(model)
        step.loss = descent.step(batches.batch(kinds))
    return model.eval()
