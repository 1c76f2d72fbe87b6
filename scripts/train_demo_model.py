"""Train the demo model of Hearth: a small Llama that answers questions about serving.

The script reads question and answer pairs from ``scripts/demo_corpus/*.toml``, trains a byte-level
BPE tokenizer and a Llama-architecture model of about five million parameters on them, and writes a
checkpoint in the Hugging Face layout. Everything random comes from one seed, so the same machine
writes the same bytes again. The modules are in ``scripts/demo_training``.

    python scripts/train_demo_model.py                # train, about 40 minutes on one CPU core
    python scripts/train_demo_model.py --evaluate     # score the existing checkpoint

The model also learns to call tools, from ``tools.toml``. With ``--start`` the training begins with
a checkpoint, such as one that knows no tools, and mostly shows what is new:

    python scripts/train_demo_model.py --start shared/demo_model --minutes 40 --rate 0.6

The files ``held_out_*.toml`` hold questions that are used only by ``--evaluate``.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from demo_training.checkpoint import save_checkpoint
from demo_training.corpus import CORPUS, Corpus, load_corpus, load_held_out
from demo_training.evaluation import evaluate, evaluate_tools
from demo_training.model import Llama, Shape
from demo_training.tokenizer import train_tokenizer
from demo_training.tool_cases import held_out_cases, shared_grams, trained_cases
from demo_training.tool_dialogues import load_tools
from demo_training.training import Recipe, train_model

ROOT = Path(__file__).resolve().parent.parent


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train the demo model of Hearth.")
    parser.add_argument("--out", type=Path, default=ROOT / "shared" / "demo_model")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after this time")
    parser.add_argument("--start", type=Path, help="checkpoint to begin with, instead of chance")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--evaluate", action="store_true", help="score --out instead of training")
    parser.add_argument("--misses", action="store_true", help="with --evaluate, print all misses")
    parser.add_argument("--tools", action="store_true", help="with --evaluate, score tools only")
    return parser.parse_args()


def train(out: Path, corpus: Corpus, recipe: Recipe) -> None:
    """Trains tokenizer and model, and writes the checkpoint."""
    start = time.monotonic()
    shape = Shape()
    tokenizer = train_tokenizer(corpus, shape.vocab_size)

    def save(model: Llama) -> None:
        save_checkpoint(out, model, tokenizer, shape)

    save(train_model(corpus, load_tools(CORPUS), tokenizer, shape, recipe, save))
    size = (out / "model.safetensors").stat().st_size
    minutes = (time.monotonic() - start) / 60
    print(f"wrote {out} in {minutes:.1f} minutes, weights {size / 1e6:.2f} MB")


def main() -> None:
    """Trains and saves, or evaluates."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    corpus = load_corpus(CORPUS)
    if arguments.evaluate:
        held_out = load_held_out(CORPUS, corpus)
        tools = load_tools(CORPUS)
        shared = shared_grams(CORPUS, tools, corpus)
        assert not shared, f"held-out questions for tools share words with the corpus: {shared}"
        groups = {
            "trained tools": trained_cases(tools),
            "held-out tools": held_out_cases(CORPUS, tools),
        }
        evaluate_tools(arguments.out, groups, show_misses=arguments.misses)
        if not arguments.tools:
            evaluate(arguments.out, corpus, held_out, show_misses=arguments.misses)
    else:
        recipe = Recipe(
            steps=arguments.steps,
            seed=arguments.seed,
            matrix_rate=Recipe.matrix_rate * arguments.rate,
            other_rate=Recipe.other_rate * arguments.rate,
            minutes=arguments.minutes,
            start=arguments.start,
        )
        train(arguments.out, corpus, recipe)


if __name__ == "__main__":
    main()
