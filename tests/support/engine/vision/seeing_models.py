"""Small random models of the families with encoders of their own: Llama 4 and Kimi K2.5."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.engine.checkpoints import write_model
from tests.support.engine.families import DEEPSEEK, LLAMA4, LLAMA4_EXPERTS, SHAPE
from tests.support.engine.vision.vision_models import IMAGE_TOKEN, TILE, Picture

PATCH = 4
TEXT = {"vocab_size": 199, "initializer_range": 0.25, "pad_token_id": 0, "eos_token_id": 2}
LLAMA4_VISION = {
    "hidden_size": 48,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": TILE,
    "patch_size": PATCH,
    "vision_output_dim": 20,
    "projector_input_dim": 20,
    "projector_output_dim": 20,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
KIMI_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": PATCH,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
    "initializer_range": 0.2,
}
# Starts of names that transformers writes, and those of the checkpoint
PUBLISHED = {
    "language_model.model.blocks.": "language_model.model.layers.",
    "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    "model.mm_projector.": "mm_projector.",
}


def write_llama4(folder: Path) -> PreTrainedModel:
    return write_model(
        folder,
        "Llama4ForConditionalGeneration",
        text_config={**TEXT, **SHAPE, **LLAMA4, **LLAMA4_EXPERTS},
        vision_config=LLAMA4_VISION,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=1,
        eoi_token_index=3,
    )


def write_kimi(folder: Path) -> PreTrainedModel:
    """Writes the published names of tensors, some of which transformers 5.24 does not give back;
    the names in the config are transformers'.
    """
    model = write_model(
        folder,
        "Kimi_K25ForConditionalGeneration",
        text_config={"model_type": "deepseek_v3", **TEXT, **SHAPE, **DEEPSEEK},
        vision_config=KIMI_VISION,
        projection_hidden_size=KIMI_VISION["hidden_size"],
        image_token_id=IMAGE_TOKEN,
        media_placeholder_token_id=IMAGE_TOKEN,
    )
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for written, published in PUBLISHED.items():
            name = name.replace(written, published)
        tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})
    return model


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@dataclass(frozen=True)
class Image(Picture):
    """An image of any size in pixels, whose grid counts tokens."""


def image(seed: int, grid: tuple[int, int]) -> Image:
    side = 2 * PATCH
    shape = (1, 3, grid[0] * side, grid[1] * side)
    return Image(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8), grid)


def llama4_vectors(model: PreTrainedModel, pixels: np.ndarray) -> Tensor:
    """pixels [tiles, 3, H, W] -> transformers' vectors, [tokens, hidden]."""
    with torch.no_grad():
        features = model.get_image_features(_in_bf16(pixels)).last_hidden_state
        return model.multi_modal_projector(features).flatten(0, 1)


def kimi_vectors(model: PreTrainedModel, pixels: np.ndarray) -> Tensor:
    """pixels [1, 3, H, W] -> transformers' vectors, [tokens, hidden]."""
    patches, grid = _patches(pixels)
    with torch.no_grad():
        return torch.cat(model.model.get_image_features(patches, grid).pooler_output)


def llama4_logprobs(model: PreTrainedModel, token_ids: Sequence[int], *pictures: Picture) -> Tensor:
    """Returns transformers' log-probabilities after every token, [T, vocab_size]: by its parts, as
    transformers 5.24 fails for the whole model.
    """
    vectors = llama4_vectors(model, np.concatenate([each.pixels for each in pictures]))
    text = torch.tensor([token_ids])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(text)
        mask = (text == IMAGE_TOKEN).unsqueeze(-1).expand_as(embedded)
        embedded = embedded.masked_scatter(mask, vectors)
        found = model.language_model(inputs_embeds=embedded)
    return found.logits[0].float().log_softmax(-1)


def kimi_logprobs(model: PreTrainedModel, token_ids: Sequence[int], *pictures: Picture) -> Tensor:
    """Returns transformers' log-probabilities after every token, [T, vocab_size]."""
    parts = [_patches(each.pixels) for each in pictures]
    patches, grids = (torch.cat(each) for each in zip(*parts, strict=True))
    with torch.no_grad():
        found = model(
            input_ids=torch.tensor([token_ids]), pixel_values=patches, image_grid_thw=grids
        )
    return found.logits[0].float().log_softmax(-1)


def _in_bf16(pixels: np.ndarray) -> Tensor:
    """The values that transformers' processor of Llama 4 computes."""
    values = torch.from_numpy(pixels).to(torch.bfloat16) * (1 / 255)
    half = torch.tensor(0.5, dtype=torch.bfloat16)
    return ((values - half) / half).float()


def _patches(pixels: np.ndarray) -> tuple[Tensor, Tensor]:
    """[1, 3, H, W] -> patches [h · w, 3, PATCH, PATCH] and the grid [[1, h, w]]."""
    values = torch.from_numpy(pixels[0]).float() / 255 * 2 - 1
    height, width = (side // PATCH for side in values.shape[1:])
    cut = values.view(3, height, PATCH, width, PATCH).permute(1, 3, 0, 2, 4)
    return cut.reshape(-1, 3, PATCH, PATCH), torch.tensor([[1, height, width]])
