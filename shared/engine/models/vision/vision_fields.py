"""What the families with an image encoder check in the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models.config_fields import ACTIVATIONS
from shared.errors import CheckpointError

Pixels = Annotated[int, msgspec.Meta(gt=0, le=8192)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Fields = TypeVar("Fields", bound=msgspec.Struct)


def read_fields(given: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Raises CheckpointError."""
    try:
        return msgspec.convert(dict(given), kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(str(error)) from None


def check_encoder(
    hidden_size: int, num_heads: int, activation: str, expected: str, *, head_multiple: int = 1
) -> None:
    """Raises CheckpointError for another activation, and for heads without a whole number of
    `head_multiple` values.
    """
    if ACTIVATIONS.get(activation, activation) != expected:
        raise CheckpointError(f"vision hidden_act {activation!r} is not supported")
    if hidden_size % num_heads:
        raise CheckpointError(
            f"vision hidden_size {hidden_size} is not a multiple of {num_heads} heads"
        )
    if hidden_size // num_heads % head_multiple:
        raise CheckpointError(
            f"vision heads of {hidden_size // num_heads} values are not multiples of "
            f"{head_multiple}, which two rotary axes need"
        )


def check_channels(num_channels: int) -> None:
    if num_channels != 3:
        raise CheckpointError(f"images of {num_channels} channels are not supported, only 3")


def check_squares(image_size: int, patch_size: int, scale: int) -> None:
    """Raises CheckpointError for tiles that are not whole squares of `scale` × `scale` patches."""
    if image_size % patch_size or image_size // patch_size % scale:
        raise CheckpointError(
            f"tiles of {image_size} pixels are not whole squares of {scale} patches of {patch_size}"
        )


def check_image_token(image_token_id: int, config: ModelConfig, name: str) -> None:
    if image_token_id >= config.vocab_size:
        raise CheckpointError(
            f"{name} {image_token_id} is outside the vocabulary of {config.vocab_size}"
        )
