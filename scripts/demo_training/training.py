"""A training run, from random weights to the trained model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from demo_training.batches import Batches, row_kinds
from demo_training.corpus import Corpus
from demo_training.model import Llama, Shape
from demo_training.progress import progress_bar


@dataclass(frozen=True)
class Recipe:
    """The parameters of a training run besides the corpus."""

    steps: int = 2000
    seed: int = 7
    dropout: float = 0.1
    matrix_rate: float = 4e-3
    other_rate: float = 3e-3
    weight_decay: float = 0.1
    warm_up: int = 50


def learning_rate(step: int, recipe: Recipe) -> float:
    """Return the factor of the learning rate: a linear rise, then half a cosine down to 1%."""
    if step < recipe.warm_up:
        return (step + 1) / recipe.warm_up
    part = (step - recipe.warm_up) / max(1, recipe.steps - recipe.warm_up)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * part)) / 2


def make_optimizers(model: Llama, recipe: Recipe) -> list[Optimizer]:
    """Use Muon for the matrices inside the layers, and AdamW for embeddings and norms."""
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
        self.schedules = [
            LambdaLR(optimizer, lambda step: learning_rate(step, recipe))
            for optimizer in self.optimizers
        ]

    def step(self, batch: tuple[Tensor, Tensor, Tensor]) -> float:
        """Train on inputs, targets and loss weights, each [B, T]; return the loss before."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = self.model.loss(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return loss.item()


def train_model(corpus: Corpus, tokenizer: Tokenizer, shape: Shape, recipe: Recipe) -> Llama:
    """Train a model from random weights, showing the loss on a progress bar."""
    torch.manual_seed(recipe.seed)
    torch.use_deterministic_algorithms(True)
    model = Llama(shape, recipe.dropout).train()
    descent = Descent(model, recipe)
    batches = Batches(corpus, tokenizer, recipe.seed)
    for step in progress_bar(recipe.steps):
        step.loss = descent.step(batches.batch(row_kinds(step.number, recipe.steps)))
    return model.eval()
