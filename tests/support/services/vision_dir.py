"""The gateway's files of a small model that takes images, in the form of SmolVLM; no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.support.services.model_dir import write_model_dir

TILE, PATCH, SCALE = 32, 8, 2
LONGEST_EDGE = 4 * TILE
TOKENS_PER_TILE = (TILE // PATCH // SCALE) ** 2
# That of SmolVLM, for contents that are lists.
CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
IMAGE_TOKENS = ["<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>"]
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": LONGEST_EDGE},
    "max_image_size": {"longest_edge": TILE},
    "resample": 1,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "rescale_factor": 1 / 255,
}


def write_vision_dir(
    path: Path,
    *,
    context: int = 2048,
    tile: int = TILE,
    patch: int = PATCH,
    scale: int = SCALE,
    longest_edge: int = LONGEST_EDGE,
) -> Path:
    write_model_dir(path, chat_template=CHAT_TEMPLATE)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    added = [*IMAGE_TOKENS, *tiles]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in added])
    tokenizer.save(str(path / "tokenizer.json"))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    config = {
        "model_type": "smolvlm",
        "image_token_id": tokenizer.token_to_id("<image>"),
        "scale_factor": scale,
        "vision_config": {"image_size": tile, "patch_size": patch},
        "text_config": {"vocab_size": size, "max_position_embeddings": context},
    }
    (path / "config.json").write_text(json.dumps(config))
    sizes = {
        "size": {"longest_edge": longest_edge},
        "max_image_size": {"longest_edge": tile},
    }
    (path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSOR, **sizes}))
    return path
