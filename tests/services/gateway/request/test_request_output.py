"""The output buffered for a client: one text per token, or one text when there are too many."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.models.served_text import ServedModel
from services.gateway.observability.metrics.gateway_metrics import GatewayMetrics
from services.gateway.output.choice_output import MAX_DELTA_TOKENS, MAX_TEXTS
from services.gateway.output.events import Finished
from services.gateway.request.generation_request import GenerationRequest
from services.gateway.request.prompt import TokenPrompt
from services.gateway.request.request_builder import RequestBuilder, assembler_of
from services.gateway.request.request_output import RequestOutput
from services.gateway.request.sampling import SamplingFields
from services.gateway.text.model_files import ModelFiles
from shared.clock import MonotonicClock
from shared.config import GatewayConfig
from shared.messages import Finish, Served, TokenLogprobs
from shared.randomness import SystemRandomness
from shared.tenancy.tenant import TenantRecord
from tests.services.gateway.peer import CARD
from tests.support.services.model_dir import served_text

LENGTH = Finish(reason="length", served=Served(num_cached_tokens=0, prefill_worker_id=None))


def delivery_of(config: GatewayConfig, files: ModelFiles, **options: Any) -> RequestOutput:
    builder = RequestBuilder(config, SystemRandomness())
    generation = GenerationRequest(
        model=CARD.name,
        prompt=TokenPrompt([5], "prompt"),
        sampling=SamplingFields(),
        **options,
    )
    prepared = builder.build(
        generation,
        ServedModel(CARD, served_text(files)),
        tenant=TenantRecord(tenant_id="t"),
        request_id="r",
        max_payload_bytes=1 << 20,
    )
    assembler = assembler_of(prepared)
    return RequestOutput(prepared, [assembler], GatewayMetrics(), MonotonicClock())


@pytest.fixture
def letters(model_files: ModelFiles) -> list[int]:
    return model_files.tokenizer.encode(["abc" * MAX_TEXTS])


@pytest.mark.parametrize("num_at_once", [1, 2, 3])
def test_each_token_has_its_own_text(
    gateway_config: GatewayConfig, model_files: ModelFiles, letters: list[int], num_at_once: int
) -> None:
    output = delivery_of(gateway_config, model_files, max_tokens=64)
    for first in range(0, 3, num_at_once):
        output.on_tokens(0, letters[first : min(first + num_at_once, 3)], ())
    output.on_finish(0, LENGTH)
    delta, end = output.take()
    decode = model_files.tokenizer.tokenizer.decode
    assert delta.texts == [decode([letter]) for letter in letters[:3]]
    assert end == Finished(0, "length")
    assert output.take() == []


def test_end_without_text_is_one_event(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    output = delivery_of(gateway_config, model_files, max_tokens=8)
    output.on_finish(0, LENGTH)
    assert output.take() == [Finished(0, "length")]


def test_more_than_max_texts_are_joined(
    gateway_config: GatewayConfig, model_files: ModelFiles, letters: list[int]
) -> None:
    output = delivery_of(gateway_config, model_files, max_tokens=400)
    for num_texts, num_returned in [(MAX_TEXTS + 1, 1), (MAX_TEXTS, MAX_TEXTS)]:
        output.on_tokens(0, (letters * 2)[:num_texts], ())
        (delta,) = output.take()
        assert len(delta.texts) == num_returned


def test_tokens_with_logprobs_are_in_one_delta(
    gateway_config: GatewayConfig, model_files: ModelFiles, letters: list[int]
) -> None:
    output = delivery_of(gateway_config, model_files, max_tokens=64, num_logprobs=0)
    for token_id in letters[:2]:
        output.on_tokens(0, (token_id,), (TokenLogprobs(-0.5),))
    (delta,) = output.take()
    assert [token.token_id for token in delta.tokens] == letters[:2]
    assert delta.text == model_files.tokenizer.tokenizer.decode(letters[:2])


@pytest.mark.parametrize("num_at_once", [1, 7, 300])
def test_backlog_of_tokens_with_logprobs_is_taken_in_parts(
    gateway_config: GatewayConfig, model_files: ModelFiles, num_at_once: int
) -> None:
    """Each part has the text of its tokens, of which several form one character."""
    text = "a😀東 fox\n" * 40
    token_ids = model_files.tokenizer.encode([text])
    output = delivery_of(gateway_config, model_files, max_tokens=500, num_logprobs=2)
    scored = TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0))
    for first in range(0, len(token_ids), num_at_once):
        fresh = token_ids[first : first + num_at_once]
        output.on_tokens(0, fresh, (scored,) * len(fresh))
    output.on_finish(0, LENGTH)
    assert output.num_buffered_bytes > 32 * len(token_ids)
    events = output.take()
    while output.has_more:
        events += output.take()
    *deltas, end = events
    assert output.num_buffered_bytes == 0
    assert "".join(delta.text for delta in deltas) == text
    assert [token.token_id for delta in deltas for token in delta.tokens] == token_ids
    assert all(token.logprobs == scored for delta in deltas for token in delta.tokens)
    assert max(len(delta.tokens) for delta in deltas) == MAX_DELTA_TOKENS
    assert end == Finished(0, "length")
    spelled = model_files.tokens.token_bytes
    shown = 0
    for delta in deltas[:-1]:
        shown += len(delta.tokens)
        of_tokens = b"".join(spelled[token_id] for token_id in token_ids[:shown])
        of_texts = "".join(each.text for each in deltas[: deltas.index(delta) + 1]).encode()
        assert of_tokens.startswith(of_texts)
        assert len(of_tokens) - len(of_texts) < 4  # within a character
