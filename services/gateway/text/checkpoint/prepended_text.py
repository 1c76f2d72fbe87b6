"""Tokenizers that write a space before a text, as SentencePiece does: `a` becomes `▁a`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

Step = dict[str, Any]


class _File(msgspec.Struct, frozen=True):
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None


def prepends_text(source: str) -> bool:
    """Whether two parts of a text, encoded apart, may get characters that the text does not have.
    `source`: the text of a `tokenizer.json`. Raises msgspec.MsgspecError if it is invalid.
    """
    file = msgspec.json.decode(source, type=_File)
    return any(map(_prepends, (*_steps(file.normalizer), *_steps(file.pre_tokenizer))))


def _prepends(step: Step) -> bool:
    match step.get("type"):
        case "Prepend":
            return True
        case "Metaspace":
            return step.get("prepend_scheme", "always") != "never"
        case "ByteLevel":
            return bool(step.get("add_prefix_space", True))
        case _:
            return False


def _steps(step: Any) -> Iterator[Step]:
    """The step itself, and those of a sequence."""
    if isinstance(step, dict):
        yield step
        for each in (*(step.get("normalizers") or ()), *(step.get("pretokenizers") or ())):
            yield from _steps(each)
