"""The pure parts of `benchmarks/adversity`: what attackers send, and how turns are compared."""

from __future__ import annotations

import asyncio
import json

import pytest

from benchmarks.adversity.attacker import ErrorBodies, Response, read_response
from benchmarks.adversity.attacks import KINDS, MAX_BODY_BYTES, NUM_PREFIXES, STEERED_TOKEN, Attack
from benchmarks.adversity.turns import Waits
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.gateway.dialects.openai.chat import CHAT_FIELDS
from services.gateway.text.model_files import ModelFiles


def test_message_is_one_http_request() -> None:
    message = Attack("PUT", "/v1/prefixes/a", b"{}").message("host:1", "key")
    head, _, body = message.partition(b"\r\n\r\n")
    assert head.startswith(b"PUT /v1/prefixes/a HTTP/1.1\r\nhost: host:1\r\n")
    assert b"content-length: 2" in head and body == b"{}"


def test_nested_bodies_are_at_the_bound() -> None:
    sizes = {len(each.body) for each in KINDS["nested"]()}
    assert max(sizes) <= MAX_BODY_BYTES and max(sizes) > 0.99 * MAX_BODY_BYTES


@pytest.mark.parametrize("kind", ["chats", "stops"])
def test_chats_are_valid_but_for_their_size(kind: str) -> None:
    """An attack that fails in the decoder would not reach the renderer."""
    for attack in KINDS[kind]():
        assert CHAT_FIELDS.decode(attack.body).messages


def test_prefixes_have_as_many_names_as_attacks() -> None:
    attacks = KINDS["prefixes"]()
    assert len({each.path for each in attacks}) == len(attacks) > NUM_PREFIXES


def test_output_is_steered_to_the_start_of_stop_strings() -> None:
    (attack,) = KINDS["stops"]()
    body = json.loads(attack.body)
    tokenizer = ModelFiles(DEMO_MODEL_DIR).tokenizer
    assert tokenizer.encode(["a"]) == [int(STEERED_TOKEN)]
    assert sum(each.startswith("aaa") for each in body["stop"]) == 1


def test_ratio_compares_p99() -> None:
    waits = Waits(alone_s=[0.01] * 100, beside_s=[0.01] * 90 + [0.03] * 10)
    ratio, rejected = waits.bars("F1", "an attack")
    assert ratio.value == pytest.approx(3) and not ratio.holds
    assert rejected.holds
    waits.rejected.append("status 429")
    assert not waits.bars("F1", "an attack")[1].holds


async def test_first_body_of_each_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    body = b'{"error": {"code": "queue_full"}}' + b"x" * 300
    reader = asyncio.StreamReader()
    reader.feed_data(b"HTTP/1.1 429 x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    errors, rejected = ErrorBodies(), await read_response(reader)
    for response in (rejected, Response("429", b"other"), Response("200", b"x"), Response("reset")):
        errors.take(response)
    assert capsys.readouterr().err == f"first 429: {body.decode()[:300]}\n"
