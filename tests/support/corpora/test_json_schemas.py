"""The corpus is what it says, and walks through its grammars end in valid documents."""

from __future__ import annotations

import random

import jsonschema_rs
import msgspec
import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.gateway.structured.grammars.grammar import json_grammar
from shared.errors import HearthError
from shared.grammar.vocabulary import Vocabulary, load_vocabulary
from tests.support.corpora.documents import is_valid
from tests.support.corpora.json_schemas import NUM_SCHEMAS, SchemaCase, schema_case

EOS_TOKEN_ID = 4
SAMPLE = range(0, NUM_SCHEMAS, 12)
MAX_TOKENS = {True: 2048, False: 300}  # by whether the document is bounded


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary(DEMO_MODEL_DIR, vocab_size=2048, eos_token_ids=(EOS_TOKEN_ID,))


def test_corpus_is_the_same_in_every_run() -> None:
    assert [schema_case(number) for number in SAMPLE] == [schema_case(n) for n in SAMPLE]
    sources = {msgspec.json.encode(schema_case(number).schema) for number in range(NUM_SCHEMAS)}
    assert len(sources) > 0.98 * NUM_SCHEMAS


def test_all_are_json_schemas() -> None:
    for number in SAMPLE:
        jsonschema_rs.meta.validate(schema_case(number).schema)


def test_strict_grammars_refuse_what_they_cannot_enforce(vocabulary: Vocabulary) -> None:
    for number in SAMPLE:
        case = schema_case(number)
        is_refused = {s: _is_refused(vocabulary, case, is_strict=s) for s in (True, False)}
        expected = {True: bool(case.unsupported) or case.is_unreadable, False: case.is_unreadable}
        assert is_refused == expected, case


def test_walks_of_allowed_tokens_end_in_valid_documents(vocabulary: Vocabulary) -> None:
    ended = 0
    for number in SAMPLE:
        case = schema_case(number)
        if case.unsupported or case.is_unreadable:
            continue
        document = _walk(vocabulary, case, random.Random(number))
        assert document is not None or not case.is_bounded, case
        if document is not None:
            assert is_valid(document, case.schema), (case, document)
            ended += 1
    assert ended > len(SAMPLE) / 3


def _is_refused(vocabulary: Vocabulary, case: SchemaCase, *, is_strict: bool) -> bool:
    grammar = json_grammar(case.schema, is_strict=is_strict)
    try:
        vocabulary.compile(grammar.kind, grammar.source)
    except HearthError:
        return True
    return False


def _walk(vocabulary: Vocabulary, case: SchemaCase, rng: random.Random) -> bytes | None:
    """Returns a document of random allowed tokens; None if it has not ended within `MAX_TOKENS`."""
    grammar = json_grammar(case.schema, is_strict=True)
    matcher, token_ids = vocabulary.compile(grammar.kind, grammar.source), list[int]()
    for _ in range(MAX_TOKENS[case.is_bounded]):
        bits = int.from_bytes(matcher.fill(), "little")
        token_id = rng.choice([bit for bit in range(vocabulary.vocab_size) if bits >> bit & 1])
        if token_id == EOS_TOKEN_ID:
            return vocabulary.decode(token_ids)
        token_ids.append(token_id)
        assert matcher.accept([token_id]) == 1
        if matcher.is_complete:
            return vocabulary.decode(token_ids)
    return None
