"""Rewrites the ids of earlier calls in the form that a model's chat template requires.

own       the ids of the client
kimi      `functions.NAME:INDEX`, with one counter over the conversation
mistral   9 alphanumeric characters: the id itself where it is one, else a digest of it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Literal

CallIds = Literal["own", "kimi", "mistral"]
Messages = Sequence[Mapping[str, Any]]

_ALPHANUMERICS = ascii_letters + digits
_MISTRAL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def with_call_ids(messages: Messages, form: CallIds) -> Messages:
    """Rewrites the ids of calls, and of the results that name them. A result without a call keeps
    its id.
    """
    if form == "own":
        return messages
    own: dict[str, str] = {}  # the new id of each of the client's; clients reuse ids later on
    rewritten: list[Mapping[str, Any]] = []
    num_calls = 0
    for message in messages:
        calls = message.get("tool_calls") or ()
        for call in calls:
            own[call["id"]] = _call_id(call, form, num_calls)
            num_calls += 1
        rewritten.append(_with_ids(message, calls, own))
    return rewritten


def mistral_id(call_id: str) -> str:
    if _MISTRAL_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(blake2b(call_id.encode(), digest_size=8).digest(), "big")
    characters = []
    for _ in range(9):
        number, index = divmod(number, len(_ALPHANUMERICS))
        characters.append(_ALPHANUMERICS[index])
    return "".join(characters)


def _call_id(call: Mapping[str, Any], form: CallIds, index: int) -> str:
    if form == "kimi":
        return f"functions.{call['function']['name']}:{index}"
    return mistral_id(call["id"])


def _with_ids(
    message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], own: Mapping[str, str]
) -> Mapping[str, Any]:
    if calls:
        return {**message, "tool_calls": [{**each, "id": own[each["id"]]} for each in calls]}
    result_of = message.get("tool_call_id")
    return (
        message if result_of is None else {**message, "tool_call_id": own.get(result_of, result_of)}
    )
