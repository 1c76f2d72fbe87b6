r"""Rewrites expressions of `pattern`, which match anywhere in a text, to match the whole text.

^ab|c$   ──▶   ab(?s:.*)|(?s:.*)c
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ANY = "(?s:.*)"
_ATOM = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def whole(pattern: str) -> str | None:
    """Returns an expression that matches a whole text, or None if the pattern has an inner `^` or
    `$`, look-around or backreferences.
    """
    branches = []
    for branch in _branches(pattern):
        starts, ends = branch[:1] == ["^"], branch[-1:] == ["$"]
        inner = branch[starts : len(branch) - ends]
        if any(each in ("^", "$", "\\b", "\\B") or re.match(r"\\[1-9]", each) for each in inner):
            return None
        text = "".join(inner)
        if re.search(r"\(\?(?!:)", text):
            return None
        branches.append(f"{'' if starts else _ANY}({text or '()'}){'' if ends else _ANY}")
    return "|".join(f"({each})" for each in branches)


def _branches(pattern: str) -> Iterator[list[str]]:
    """Yields the atoms of each alternative outside groups."""
    depth, branch = 0, list[str]()
    for found in _ATOM.finditer(pattern):
        atom = found[0]
        depth += (atom == "(") - (atom == ")")
        if atom == "|" and not depth:
            yield branch
            branch = []
        else:
            branch.append(atom)
    yield branch
