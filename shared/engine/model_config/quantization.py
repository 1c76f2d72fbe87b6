"""The format of each linear layer of a checkpoint.

The lists of `quantization_config` name layers as the checkpoint or as transformers does
(`own_names`), never as the model does. A target is the full name of a layer, `re:` and a regular
expression that matches from the start of the name, or a class, of which there is one (`Linear`). An
ignored name is written alike.
Source: compressed-tensors' matching of modules, where a name has priority over an expression and
that over a class.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import msgspec

from shared.engine.model_config.checkpoint_form import own_names
from shared.engine.model_config.formats import WeightFormat

LINEAR = "Linear"
PATTERN = "re:"
Renames = tuple[tuple[str, str], ...]


class Match(NamedTuple):
    """What names a layer. Matches of a lower `rank` have priority."""

    rank: int
    pattern: str


class ConfigGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of one format; None: they are dense."""

    targets: tuple[str, ...]
    form: WeightFormat | None


class Quantization(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The formats of a checkpoint's layers. Of groups that match alike the first has priority.

    `renames` are those of the checkpoint's form.
    """

    groups: tuple[ConfigGroup, ...]
    ignored: tuple[str, ...] = ()
    renames: Renames = ()

    def format_of(self, name: str) -> WeightFormat | None:
        """Returns the format of the linear layer `name`, as the model names it, or None if it is
        dense.
        """
        if find_match(name, self.ignored, self.renames) is not None:
            return None
        group = self._group(name)
        return None if group is None else group.form

    def has_format_of(self, name: str, group: ConfigGroup) -> bool:
        """Whether a layer is one of the group's and has the group's format."""
        is_named = find_match(name, group.targets, self.renames) is not None
        return is_named and self.format_of(name) == group.form

    def reason(self, name: str) -> str:
        """Describes what quantization_config does with a linear layer, as the end of a sentence."""
        ignored = find_match(name, self.ignored, self.renames)
        if ignored is not None:
            return f"ignores it by {ignored.pattern!r}"
        group = self._group(name)
        if group is None:
            return "targets it with no config group"
        return f"makes it {group.form or 'dense'}"

    def _group(self, name: str) -> ConfigGroup | None:
        found = [
            (match.rank, group)
            for group in self.groups
            if (match := find_match(name, group.targets, self.renames)) is not None
        ]
        return min(found, key=lambda each: each[0])[1] if found else None


class LayerFormats(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of one decoder layer, whose tensors' names begin with `place`."""

    place: str
    quantization: Quantization = msgspec.field(name="quantisation")  # revisions of weights have it

    def of(self, path: str) -> WeightFormat | None:
        """Returns the format of the linear layer at `place.path`, or None if it is dense."""
        return self.quantization.format_of(f"{self.place}.{path}")


@cache
def find_match(name: str, patterns: tuple[str, ...], renames: Renames = ()) -> Match | None:
    """Returns which of the patterns names a layer, which the model calls `name`; None: none."""
    names = own_names(name, renames)
    full, expressions = _compiled(patterns)
    exact = next((each for each in names if each in full), None)
    if exact is not None:
        return Match(0, exact)
    for expression in expressions:
        if any(expression.match(each) for each in names):
            return Match(1, f"{PATTERN}{expression.pattern}")
    return Match(2, LINEAR) if LINEAR in full else None


@cache
def _compiled(patterns: tuple[str, ...]) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
    """Returns full names and classes, and expressions: published lists have thousands of names."""
    full = frozenset(each for each in patterns if not each.startswith(PATTERN))
    written = [each for each in patterns if each.startswith(PATTERN)]
    return full, tuple(re.compile(each.removeprefix(PATTERN)) for each in written)
