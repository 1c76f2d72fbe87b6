"""What the seam to llguidance allows, and the errors that it makes of llguidance's flags."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import jsonschema_rs
import pytest

from shared.errors import CheckpointError, GrammarFailed, GrammarTooComplex, InvalidRequest
from shared.grammar.vocabulary import Vocabulary, load_vocabulary
from tests.shared.grammar.support import (
    EOS,
    HOSTILE_REGEX,
    MODEL_DIR,
    allowed,
    compiled,
    encode,
    vocabulary,
    walk,
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_outputs_of_a_schema_are_valid() -> None:
    matcher, validator = (
        compiled("json_schema", json.dumps(PERSON)),
        jsonschema_rs.validator_for(PERSON),
    )
    random, num_ended = Random(1), 0
    for _ in range(30):
        token_ids = walk(matcher.copy(), random)
        if token_ids is not None:
            validator.validate(json.loads(vocabulary().decode(token_ids)))
            num_ended += 1
    assert num_ended > 10


def test_replay_of_a_usual_output_takes_no_limit() -> None:
    """Without masks between its tokens; those of the names are long lexemes."""
    schema = {"type": "object", "patternProperties": {"^.{1,255}$": {"type": "string"}}}
    document = {f"{number} {'long name ' * 12}": "text " * 20 for number in range(12)}
    token_ids = vocabulary().encode(json.dumps(document))
    matcher = compiled("json_schema", json.dumps(schema))
    assert matcher.accept(token_ids) == len(token_ids)
    assert matcher.is_accepting


def test_end_is_allowed_exactly_where_the_grammar_may_end() -> None:
    matcher = compiled("regex", "[ab]{2,3}")
    ends = []
    for token_id in encode("a") * 3:
        ends.append(EOS in allowed(matcher.fill()))
        assert not matcher.is_complete
        assert matcher.accept([token_id]) == 1
    assert ends == [False, False, True]
    assert matcher.is_complete
    assert allowed(matcher.fill()) == [EOS]


def test_lark_grammars_name_special_tokens_by_id() -> None:
    matcher = compiled("lark", "start: <[2]> /a+/ <[3]>")
    assert allowed(matcher.fill()) == [2]
    assert matcher.accept([2, *encode("a"), 3]) == 3
    assert matcher.is_complete


def test_ids_beyond_the_tokenizer_are_never_allowed() -> None:
    matcher = vocabulary(vocab_size=2100).compile("regex", r"(?s:.*)")
    words = matcher.fill()
    assert len(words) == 4 * 66
    assert 1000 < len(allowed(words)) <= max(allowed(words)) < 2048


def test_matcher_stays_before_a_token_that_is_not_allowed() -> None:
    matcher = compiled("regex", "abc")
    assert matcher.accept([*encode("ab"), *encode("z")]) == len(encode("ab"))
    assert matcher.accept(encode("c")) == 1
    assert matcher.is_complete
    assert matcher.accept(encode("c")) == 0


def test_long_outputs_are_accepted_in_parts() -> None:
    matcher = compiled("regex", "a*")
    assert matcher.accept(encode("a") * 1000) == 1000
    assert matcher.accept(encode("a") * 300 + encode("b")) == 300


def test_copies_are_independent() -> None:
    first = compiled("regex", "a(b|c)")
    first.accept(encode("a"))
    second = first.copy()
    assert first.accept(encode("b")) == 1
    assert second.accept(encode("c")) == 1
    assert first.is_complete
    assert second.is_complete


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", '{"type":', "expected|EOF"),
        ("json_schema", '{"type": "integer", "multipleOf": "x"}', "multipleOf"),
        ("regex", "[", "unclosed character class"),
        ("lark", "start: missing", "missing"),
        ("bnf", "x", "its kind is 'bnf'"),
    ],
)
def test_invalid_grammars_name_their_fault(kind: str, source: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"invalid grammar: .*({reason})"):
        compiled(kind, source)


def use(kind: str, source: str) -> None:
    random = Random(3)
    matcher = compiled(kind, source)
    for _ in range(200):
        token_ids = [token_id for token_id in allowed(matcher.fill()) if token_id != EOS]
        matcher.accept([random.choice(token_ids)])


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", '{"$ref": "#"}'),
        ("regex", "^(a{1000}){1000}$"),
        ("regex", HOSTILE_REGEX),
        ("lark", 'start: "a" b\nb: "x" b'),
        ("json_schema", json.dumps({"enum": [f"item {number}" for number in range(30_000)]})),
    ],
)
def test_grammars_without_an_end_or_over_a_limit_raise(kind: str, source: str) -> None:
    with pytest.raises(GrammarTooComplex) as caught:
        use(kind, source)
    assert 0 < len(caught.value.message) < 200


def test_warnings_name_what_a_lenient_schema_ignores() -> None:
    schema = {"type": "object", "if": {}, "x-guidance": {"lenient": True}}
    assert any("if" in warning for warning in compiled("json_schema", json.dumps(schema)).warnings)


def test_vocabularies_that_grammars_cannot_use_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: error loading tokenizer"):
        Vocabulary("{}", vocab_size=10, eos_token_ids=(1,))
    with pytest.raises(CheckpointError, match="vocab size too small"):
        load_vocabulary(MODEL_DIR, vocab_size=100, eos_token_ids=(EOS,))
    with pytest.raises(CheckpointError, match="no end-of-sequence token"):
        load_vocabulary(MODEL_DIR, vocab_size=2048, eos_token_ids=())
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: No such file"):
        load_vocabulary(MODEL_DIR / "none", vocab_size=2048, eos_token_ids=(EOS,))


def test_released_vocabulary_is_read_again_unless_its_file_has_changed(tmp_path: Path) -> None:
    path = shutil.copy(MODEL_DIR / "tokenizer.json", tmp_path / "tokenizer.json")
    own = load_vocabulary(tmp_path, vocab_size=2048, eos_token_ids=(EOS,))
    expected = own.compile("regex", "[ab]+").fill()
    own.release()
    assert own._loaded is None
    assert own.compile("regex", "[ab]+").fill() == expected
    own.release()
    path.write_text(path.read_text() + " ")
    with pytest.raises(GrammarFailed, match=r"tokenizer\.json has changed"):
        own.compile("regex", "[ab]+")
