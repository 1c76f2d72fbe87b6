"""Cases as tensors, made by a pool of processes while the model learns."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor

from demo_vision_training.questions import Case, case
from demo_vision_training.text import PAD, TILE, parts_of, prompt_of

IGNORED = -100
# One thing a picture first: the encoder learns colours and shapes in some hundred steps, and with
# all kinds mixed from the start it learns none in two thousand.
FIRST_KIND, NUM_FIRST = "what", 300  # batches
MAX_TURNS = 2  # learned of a case


class Batch(NamedTuple):
    token_ids: Tensor  # [B, T]
    attended: Tensor  # [B, T]
    labels: Tensor  # [B, T] the answers' tokens, else IGNORED
    pixels: Tensor  # [B, images, 3, TILE, TILE]; zeros where a case has fewer


def pixels_of(image: Image.Image) -> NDArray[np.float32]:
    """[3, TILE, TILE] as the processor makes them, normalized."""
    resized = image.resize((TILE, TILE), Image.Resampling.LANCZOS)
    return np.asarray(resized, dtype=np.float32).transpose(2, 0, 1) / 127.5 - 1


def tokens_of(
    each: Case, tokenizer: Tokenizer, *, has_answers: bool
) -> tuple[list[int], list[int]]:
    """Returns the tokens of a case and their labels: of MAX_TURNS with their answers, or of the
    first question alone.
    """
    if not has_answers:
        prompt = tokenizer.encode(prompt_of(each)).ids
        return prompt, [IGNORED] * len(prompt)
    token_ids, labels = list[int](), list[int]()
    for prompt_text, answer_text in parts_of(each)[:MAX_TURNS]:
        prompt, answer = (tokenizer.encode(text).ids for text in (prompt_text, answer_text))
        token_ids += prompt + answer
        labels += [IGNORED] * len(prompt) + answer
    return token_ids, labels


def batch_of(cases: list[Case], tokenizer: Tokenizer, *, has_answers: bool = True) -> Batch:
    rows = [tokens_of(each, tokenizer, has_answers=has_answers) for each in cases]
    width = max(len(ids) for ids, _ in rows)
    token_ids = torch.full((len(cases), width), tokenizer.token_to_id(PAD))
    labels = torch.full((len(cases), width), IGNORED)
    attended = torch.zeros(len(cases), width, dtype=torch.long)
    for row, (ids, wanted) in enumerate(rows):
        # padding on the left, so that answers to be generated follow all prompts
        token_ids[row, width - len(ids) :] = torch.tensor(ids)
        labels[row, width - len(ids) :] = torch.tensor(wanted)
        attended[row, width - len(ids) :] = 1
    most = max(len(each.images) for each in cases)
    pixels = np.zeros((len(cases), most, 3, TILE, TILE), dtype=np.float32)
    for row, each in enumerate(cases):
        for column, image in enumerate(each.images):
            pixels[row, column] = pixels_of(image)
    return Batch(token_ids, attended, labels, torch.from_numpy(pixels))


def _made(numbers: range, kind: str | None) -> list[Case]:
    return [case(number, kind) for number in numbers]


def training_batches(
    tokenizer: Tokenizer,
    size: int,
    seed: int,
    num_first: int = NUM_FIRST,
    more: str | None = None,
) -> Generator[Batch, None, None]:
    """Yields batches without end, the first `num_first` of FIRST_KIND, later each second one of
    the kind `more`, if there is one. Each case has a number of its own; `seed` moves them.
    """
    first = seed << 32
    with ProcessPoolExecutor(1) as pool:
        made = pool.submit(_made, range(first, first + size), FIRST_KIND if num_first else None)
        for step in count(1):
            first += size
            kind = FIRST_KIND if step < num_first else more if step % 2 else None
            cases, made = made.result(), pool.submit(_made, range(first, first + size), kind)
            yield batch_of(cases, tokenizer)
