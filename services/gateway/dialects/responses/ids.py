"""Ids of responses and of their items. An item's id names its response, so that a reference to the
item finds it.

resp_{32 hex}        msg_{32 hex of its response}{4 hex: its index}        … of the input: {32}i{4}
"""

from __future__ import annotations

import re
from hashlib import blake2b

ID_BYTES = 16
_RESPONSE = re.compile(r"resp_[0-9a-f]{32}")
_ITEM = re.compile(r"[a-z]{2,8}_([0-9a-f]{32})i?[0-9a-f]{4,6}")


def response_id(request_id: str) -> str:
    return f"resp_{blake2b(request_id.encode(), digest_size=ID_BYTES).hexdigest()}"


def is_response_id(text: str) -> bool:
    return _RESPONSE.fullmatch(text) is not None


def item_id(prefix: str, response: str, index: int, *, is_input: bool = False) -> str:
    mark = "i" if is_input else ""
    return f"{prefix}_{response.removeprefix('resp_')}{mark}{index:04x}"


def response_of_item(item: str) -> str | None:
    """Returns the id of the response that has the item, or None for an id that no response has."""
    found = _ITEM.fullmatch(item)
    return None if found is None else f"resp_{found[1]}"
