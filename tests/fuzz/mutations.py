"""Hypothesis strategies that spoil valid data: trees of plain values, and bytes.

A decoder's cheap checks reject random bytes immediately. Valid data with one wrong part gets past
them, so every strategy starts from good examples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

NUMBERS = (
    *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 15, 127, 255, 256, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
    *(-1.0, -0.0, 0.5, 1e-320, 1e38, 1e39, 1e308, math.nan, math.inf, -math.inf),
)
TEXTS = (
    *("", " ", "a b", "a.b", "*", ">", "\0", "\n", "\r\nPUB x 0\r\n", "..", "/", "\u2028"),
    *("\ud7ff", "\ufdd00\ufdd1", "\u0661", "😀", "x" * 300, "x" * 70_000, "0", "-1", "nan"),
)
BYTES = (b"", b"\0", b"\xff", b"x" * 15, b"x" * 16, b"x" * 17, b"x" * 64, b"x" * 65, bytes(70_000))
NESTED: list[Any] = []
for _ in range(100):
    NESTED = [NESTED]
LISTS: tuple[Any, ...] = ([], [[]], [None], {}, {"": {}}, [0] * 5000, [""] * 300, NESTED)

numbers = st.sampled_from(NUMBERS) | st.integers(-(2**63), 2**64 - 1) | st.floats(width=64)
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
chunks = st.sampled_from(BYTES) | st.binary(max_size=64)
values = st.none() | st.booleans() | numbers | texts | chunks | st.sampled_from(LISTS)
# Values that only JSON can express: unbounded numbers, half characters.
json_extremes = st.sampled_from((10**400, -(10**25), "\ud800", "a\udfffb"))
json_values = st.none() | st.booleans() | numbers | texts | json_extremes | st.sampled_from(LISTS)

Path = tuple[Any, ...]


def paths(tree: Any, path: Path = ()) -> list[Path]:
    """The paths of every value in the tree."""
    found = [path]
    if isinstance(tree, dict):
        for key, value in tree.items():
            found += paths(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree[:8]):
            found += paths(value, (*path, index))
    return found


def _alike(value: Any, *, has_bytes: bool) -> st.SearchStrategy[Any]:
    """Values of the same kind first: others are rejected by type alone."""
    anything = values if has_bytes else json_values
    match value:
        case bool():
            return st.booleans() | anything
        case int() | float():
            return numbers | numbers | anything
        case str():
            return texts | texts | anything
        case bytes():
            return chunks | chunks | anything
        case list():
            repeated = st.sampled_from((0, 2, 17, 129, 3000)).map(lambda times: value[:4] * times)
            return repeated | repeated | anything
    return anything


@st.composite
def spoiled(draw: st.DrawFn, good: Sequence[Any], *, has_bytes: bool = True) -> Any:
    """One of the good trees with up to three of its values changed, removed or added."""
    tree = copy.deepcopy(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(tree)))
        if not path:
            continue
        parent = tree
        for step in path[:-1]:
            parent = parent[step]
        how = draw(st.sampled_from(("change", "change", "change", "remove", "add", "repeat")))
        if how == "change":
            new_value = draw(_alike(parent[path[-1]], has_bytes=has_bytes))
            parent[path[-1]] = copy.deepcopy(new_value)
        elif how == "remove":
            del parent[path[-1]]
        elif isinstance(parent, list):
            parent.insert(0, copy.deepcopy(parent[path[-1]]))
        elif how == "add":
            parent[draw(texts)] = copy.deepcopy(draw(values if has_bytes else json_values))
    return tree


@st.composite
def torn(draw: st.DrawFn, good: Sequence[bytes]) -> bytes:
    """One of the good byte strings, cut, flipped, or with something inserted or repeated."""
    data = draw(st.sampled_from(good))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        how = draw(st.sampled_from(("cut", "flip", "insert", "repeat", "drop", "nest")))
        if how == "cut":
            data = data[:at]
        elif how == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ draw(st.integers(1, 255))]) + data[at + 1 :]
        elif how == "insert":
            data = data[:at] + draw(st.binary(max_size=9)) + data[at:]
        elif how == "repeat":
            data = data[:at] + data[max(0, at - 40) : at] + data[at:]
        elif how == "nest":
            data = data[:at] + draw(st.sampled_from((b"\x91", b"[", b'{"":'))) * 5000 + data[at:]
        else:
            data = data[:at] + data[at + draw(st.integers(1, 40)) :]
    return data


anything = st.binary(max_size=200)
