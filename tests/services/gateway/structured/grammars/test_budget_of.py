"""The budget of reasoning as tokens of each family's markers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.structured.grammars.thinking import Thinking, budget_of, mark_spellings
from services.gateway.structured.tools.families import GEMMA4, HARMONY, HERMES, PLAIN, with_thinking
from services.gateway.structured.tools.family import Family
from services.gateway.text.tokenizer import PromptTokenizer
from tests.support.services.model_dir import write_model_dir

THINKING_HERMES = with_thinking(HERMES, "<think>", "</think>\n\n")


@pytest.fixture(scope="module")
def spelled(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    """With the markers of several families as added tokens."""
    path = tmp_path_factory.mktemp("spelled") / "tokenizer.json"
    tokenizer.save(str(path))
    return PromptTokenizer(path.read_text())


@pytest.mark.parametrize(
    ("family", "opens", "closes"),
    [
        (THINKING_HERMES, "<think>", "</think>"),
        (HARMONY, "<|channel|>analysis<|message|>", "<|end|>"),
        (GEMMA4, "<|channel>thought", "<channel|>"),
    ],
)
@pytest.mark.parametrize("thinking", ["open", "undecided"])
def test_markers_of_families(
    spelled: PromptTokenizer, family: Family, opens: str, closes: str, thinking: Thinking
) -> None:
    spellings = mark_spellings(family, spelled.spellings)
    found = budget_of(7, thinking, family, spellings)
    assert found is not None
    assert (found.max_tokens, found.is_open) == (7, thinking == "open")
    assert found.opens[0] == tuple(spelled.encode([opens]))
    assert found.closes[0] == tuple(spelled.encode([closes]))
    is_added = spelled.added_token_id(closes) is not None
    assert (len(found.closes[0]) == len(found.closes) == 1) == is_added


def test_family_without_markers(spelled: PromptTokenizer) -> None:
    assert mark_spellings(PLAIN, spelled.spellings) == {}
    assert budget_of(7, "closed", PLAIN, {}) is None


def test_spellings_of_a_text_hold_what_tokens_join_with_it(tmp_path: Path) -> None:
    """A model writes the marker after a line's end, and a vocabulary has tokens over both."""
    corpus = ["\n</think>\n\nyes", ".</think>\n"] * 20
    path = write_model_dir(tmp_path / "text", corpus=corpus) / "tokenizer.json"
    tokenizer = PromptTokenizer(path.read_text())
    found = tokenizer.spellings("</think>")
    assert found[0] == tuple(tokenizer.encode(["</think>"]))
    assert len(set(found)) == len(found) > 1
    for before in ("a", "a.", "a\n", "a.\n\n"):
        for after in ("b", "\n\nb"):
            written = tokenizer.encode([f"{before}</think>{after}"])
            assert any(
                tuple(written[start : start + len(mark)]) == mark
                for mark in found
                for start in range(len(written))
            ), (before, after)
    decode = tokenizer.tokenizer.decode
    assert all("</think>" in decode(list(mark)) for mark in found)
    assert len(tokenizer.spellings("é")) > 0
