from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.gateway.structured.grammars.grammar import TokenIdOf
from shared.grammar.spec import GrammarSpec
from shared.grammar.vocabulary import Vocabulary
from tests.support.services.model_dir import EOS_TOKEN_ID, write_model_dir

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
HARMONY = [f"<|{each}|>" for each in ("start", "channel", "message", "end", "constrain", "call")]

Accepts = Callable[[GrammarSpec, str], bool]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The gateway's small one, with the markers of several families."""
    path = write_model_dir(tmp_path_factory.mktemp("models") / "markers") / "tokenizer.json"
    tokenizer = Tokenizer.from_str(Path(path).read_text())
    tokenizer.add_special_tokens([*MARKERS, *HARMONY])
    return tokenizer


@pytest.fixture(scope="session")
def token_id_of(tokenizer: Tokenizer) -> TokenIdOf:
    added = {each.content: key for key, each in tokenizer.get_added_tokens_decoder().items()}
    return added.get


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer.to_str(), vocab_size=None, eos_token_ids=[EOS_TOKEN_ID])


@pytest.fixture(scope="session")
def accepts(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Accepts:
    """Whether the text is an output that the grammar accepts, from its first token; a marker in
    the text is one token.
    """

    def is_accepted(spec: GrammarSpec, text: str) -> bool:
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids
        matcher = vocabulary.compile(spec.kind, spec.source)
        return matcher.accept(token_ids) == len(token_ids) and matcher.is_accepting

    return is_accepted
