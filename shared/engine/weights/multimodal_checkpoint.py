"""The language model of a checkpoint that also has an image encoder."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from shared.engine.parallel.cuts import Cut
from shared.engine.weights.weight_source import Content, TensorInfo, WeightSource

# The prefixes that transformers writes, and the parameter names of its models.
TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.")


class TextTensors:
    """A `WeightSource` of the language model, by the names of a text-only checkpoint."""

    def __init__(self, tensors: WeightSource) -> None:
        self._tensors = tensors
        self._source = {
            _text_name(name): name for name in tensors.names() if not _is_other_part(name)
        }

    def names(self) -> list[str]:
        return sorted(self._source)

    def files(self) -> list[Path]:
        return self._tensors.files()

    def path(self, name: str) -> Path:
        return self._tensors.path(self._source[name])

    def info(self, name: str) -> TensorInfo:
        return self._tensors.info(self._source[name])

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        self._tensors.read_into(self._source[name], cut, out)

    def content(self, name: str) -> Content:
        return self._tensors.content(self._source[name])


def _is_other_part(name: str) -> bool:
    return name.removeprefix("model.").startswith(OTHER_PARTS)


def _text_name(name: str) -> str:
    for prefix, short in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return short + name.removeprefix(prefix)
    return name
