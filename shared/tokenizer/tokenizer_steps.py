"""Reads what a `tokenizer.json` does besides its vocabulary: steps before and after its model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from shared.tokenizer.tiktoken_model import AddedToken

Step = dict[str, Any]


class Model(msgspec.Struct, frozen=True):
    type: str = ""
    byte_fallback: bool = False
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class TokenizerSteps(msgspec.Struct, frozen=True):
    model: Model = Model()
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None
    post_processor: Step | None = None
    decoder: Step | None = None
    added_tokens: list[AddedToken] = []


def read_steps(source: str) -> TokenizerSteps:
    """Reads the text of a `tokenizer.json`. Raises msgspec.MsgspecError if it is invalid."""
    return msgspec.json.decode(source, type=TokenizerSteps)


def flattened(step: Step | None) -> Iterator[Step]:
    """Returns the steps of sequences in their order, without the sequences."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for name in ("normalizers", "pretokenizers", "processors", "decoders"):
        for part in step.get(name) or ():
            yield from flattened(part)
