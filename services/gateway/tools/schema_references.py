"""References inside a JSON Schema."""

from __future__ import annotations

from typing import Any


def resolve(root: dict[str, Any], reference: str) -> Any:
    """The schema at a JSON pointer of the same document; True, any value, for other references."""
    fragment, is_fragment, pointer = reference.partition("#")
    if fragment or not is_fragment:
        return True
    found: Any = root
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or key not in found:
            return True
        found = found[key]
    return found
