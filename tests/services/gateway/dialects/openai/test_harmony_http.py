"""Harmony, the format of gpt-oss, over HTTP: an operator may name it for any model."""

from __future__ import annotations

import pytest

from shared.grammar.spec import GrammarSpec
from tests.services.gateway.conftest import Cluster
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.services.gateway.dialects.openai.test_tools_http import answers

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_completion_has_no_markup_of_the_family(cluster: Cluster) -> None:
    """No chat template wrote its prompt: the constraint is of all its text, which is not parsed."""
    text = "<|channel|>final<|message|>{}<|end|>"
    async with cluster.beside(response_template="harmony") as beside:
        answers(cluster, text)
        free = {"prompt": "hi", "max_tokens": 400}
        constrained = {**free, "guided_regex": "a+"}
        for body in (free, constrained):
            response = await beside.http.post("/v1/completions", json=body)
            assert response.json()["choices"][0]["text"] == text
        sent = [(await cluster.scheduler.submits.get()).request.sampling.grammar for _ in "ab"]
        assert sent == [None, GrammarSpec(kind="regex", source="a+")]
        chat = await beside.http.post(CHAT, json={**BODY, "guided_regex": "a+", "max_tokens": 400})
        assert chat.json()["choices"][0]["message"]["content"] == "{}<|end|>"
        grammar = (await cluster.scheduler.submits.get()).request.sampling.grammar
        assert grammar is not None and "final" in grammar.source
