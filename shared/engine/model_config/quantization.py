"""The format of each linear layer of a checkpoint, by its full name.

A target is a class, of which there is one (`Linear`), the full name of a layer, or `re:` and a
regular expression that matches from the start of the name. An ignored name is written alike.
"""

from __future__ import annotations

import re
from functools import cache

import msgspec

from shared.engine.model_config.formats import WeightFormat

LINEAR = "Linear"
_PATTERN = "re:"


class ConfigGroup(msgspec.Struct, frozen=True, kw_only=True):
    targets: tuple[str, ...]
    form: WeightFormat

    def matches(self, name: str) -> bool:
        return any(target == LINEAR or is_named(name, target) for target in self.targets)


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of a checkpoint's layers. `groups` have priority in their order."""

    groups: tuple[ConfigGroup, ...]
    ignored: tuple[str, ...] = ()

    def format_of(self, name: str) -> WeightFormat | None:
        """Returns the format of the linear layer `name`, as the model names it, or None if it is
        dense.
        """
        if any(is_named(name, each) for each in self.ignored):
            return None
        return next((group.form for group in self.groups if group.matches(name)), None)

    def reason(self, name: str) -> str:
        """Describes what quantization_config does with a linear layer, as the end of a sentence."""
        for each in self.ignored:
            if is_named(name, each):
                return f"ignores it by {each!r}"
        form = self.format_of(name)
        return "targets it with no config group" if form is None else f"makes it {form}"


class LayerFormats(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of one decoder layer, whose tensors' names begin with `place`."""

    place: str
    quantization: Quantization = msgspec.field(name="quantisation")  # revisions of weights have it

    def of(self, path: str) -> WeightFormat | None:
        """Returns the format of the linear layer at `place.path`, or None if it is dense."""
        return self.quantization.format_of(f"{self.place}.{path}")


@cache
def is_named(name: str, pattern: str) -> bool:
    """Whether a pattern is a layer's name: the model's, a base model's without `model.`, or a
    language model's beside an encoder.
    """
    if not pattern.startswith(_PATTERN):
        return pattern in _names(name)
    compiled = re.compile(pattern.removeprefix(_PATTERN))
    return any(compiled.match(each) for each in _names(name))


def _names(name: str) -> tuple[str, ...]:
    inside = name.removeprefix("model.")
    full = f"model.{inside}" if inside.startswith("layers.") else name
    return full, inside, f"language_model.{full}", f"model.language_model.{inside}"
