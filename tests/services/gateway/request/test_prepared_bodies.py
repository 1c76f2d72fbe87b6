"""Which bodies the gateway decodes itself, and which a preparation process does."""

from __future__ import annotations

import msgspec
import pytest

from services.gateway.request.prepared_bodies import MAX_INLINE_BYTES, is_small
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import CHAT

MESSAGE = {"role": "user", "content": "a few words, and a few more"}


@pytest.mark.parametrize(
    ("content", "is_inline"),
    [
        ([MESSAGE] * 2300, False),  # of 140 KB
        ([[]] * 60_000, False),
        ([{"a": {"b": 1}}] * 15_000, False),
        ([MESSAGE] * 300, True),
        ([{**MESSAGE, "content": "words, and words. " * 12_000}], True),
        (list(range(30_000)), True),  # a prompt of tokens
    ],
    ids=["messages", "lists", "objects", "few messages", "text", "numbers"],
)
def test_body_of_many_values_is_large(content: object, is_inline: bool) -> None:
    body = msgspec.json.encode({"model": "tiny", "content": content})
    assert len(body) < MAX_INLINE_BYTES
    assert is_small(body) == is_inline


def test_values_of_spaced_objects_count() -> None:
    """As Jackson writes them."""
    object_ = b"{" + b", ".join(b'"k%d" : 1' % number for number in range(3000)) + b"}"
    assert not is_small(object_)


async def test_many_messages_are_prepared_in_a_process(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared: list[str] = []
    prepare_body = cluster.gateway.preparer.prepare_body

    async def record(*arguments: object, **options: object) -> object:
        prepared.append(str(arguments[2]))
        return await prepare_body(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cluster.gateway.preparer, "prepare_body", record)
    for count, expected in ((1, []), (800, ["chat"])):
        body = {"messages": [{"role": "user", "content": "a"}] * count, "max_tokens": 1}
        await cluster.http.post(CHAT, json=body)
        assert prepared == expected
