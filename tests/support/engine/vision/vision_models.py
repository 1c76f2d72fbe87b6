"""Small random models with an image encoder, prompts with images, and transformers' answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from shared.messages import ImagePart
from tests.support.engine.checkpoints import write_model

IMAGE_TOKEN = 150
TILE = 24  # pixels; 6 x 6 patches, so 9 tokens
TOKENS_PER_TILE = 9
VISION = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": TILE,
    "patch_size": 4,
}


def write_smolvlm(
    folder: Path, architecture: str = "SmolVLMForConditionalGeneration", **options: Any
) -> PreTrainedModel:
    """Writes a checkpoint; `text` and `vision` are fields of its two parts. Returns its model, in
    FP32 and evaluation mode.
    """
    vision = {**VISION, **options.pop("vision", {})}
    text = {
        "model_type": "llama",
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 2048,
        "initializer_range": 0.25,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **options.pop("text", {}),
    }
    fields = {
        "vision_config": {"initializer_range": 0.2, **vision},
        "text_config": text,
        "scale_factor": 2,
        "image_token_id": IMAGE_TOKEN,
    }
    model = write_model(folder, architecture, **{**fields, **options})
    path = folder / "config.json"
    config = msgspec.json.decode(path.read_bytes())
    for name in text.keys() & config.keys() - {"model_type", "eos_token_id", "pad_token_id"}:
        del config[name]  # of its text model alone
    path.write_bytes(msgspec.json.encode(config))
    return model


@dataclass(frozen=True)
class Picture:
    pixels: NDArray[np.uint8]  # [tiles, 3, TILE, TILE]
    grid: tuple[int, int] = (0, 0)

    @property
    def image_hash(self) -> bytes:
        """Any injective digest serves here: gateways also hash the processor."""
        return blake2b(self.pixels.tobytes() + bytes(self.grid), digest_size=16).digest()


def picture(seed: int, grid: tuple[int, int] = (0, 0)) -> Picture:
    shape = (grid[0] * grid[1] + 1, 3, TILE, TILE)
    return Picture(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), grid)


def prompt_with(*parts: Sequence[int] | Picture) -> tuple[list[int], tuple[ImagePart, ...]]:
    """Returns token ids and images. A tile's tokens follow a separator, token 5."""
    token_ids: list[int] = []
    images = []
    for part in parts:
        if not isinstance(part, Picture):
            token_ids += part
            continue
        first = len(token_ids) + 1
        for _ in part.pixels:
            token_ids += [5, *[IMAGE_TOKEN] * TOKENS_PER_TILE]
        images.append(
            ImagePart(
                first_token=first,
                num_tokens=len(token_ids) - first,
                image_hash=part.image_hash,
                grid=part.grid,
            )
        )
    return token_ids, tuple(images)


def expected_logprobs(
    model: PreTrainedModel, token_ids: Sequence[int], *pictures: Picture
) -> torch.Tensor:
    """Returns transformers' log-probabilities after every token, [T, vocab_size]."""
    tiles = np.concatenate([each.pixels for each in pictures])
    values = torch.from_numpy(tiles).float() / 255 * 2 - 1
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            pixel_values=values.unsqueeze(0),
            pixel_attention_mask=torch.ones(1, len(tiles), TILE, TILE, dtype=torch.long),
        )
    return found.logits[0].float().log_softmax(-1)
