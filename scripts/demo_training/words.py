"""The word lists of ``words.toml``, read once, when this module is first imported."""

from __future__ import annotations

from pathlib import Path

import msgspec


class WordLists(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The lists of ``words.toml``, which describes each; draws depend on the order of the words."""

    explain: tuple[str, ...]
    prefixes: tuple[str, ...]
    suffixes: tuple[str, ...]
    stop_words: frozenset[str]
    synonyms: tuple[tuple[str, ...], ...]
    system_messages: tuple[str, ...]
    personas: tuple[str, ...]
    manners: tuple[str, ...]
    topics: tuple[str, ...]
    topic_questions: tuple[str, ...]
    who: tuple[str, ...]
    does: tuple[str, ...]
    what: tuple[str, ...]
    where: tuple[str, ...]

    def everyday(self) -> str:
        """Returns the everyday words as one text, from which the tokenizer learns them."""
        sentences = (*self.who, *self.does, *self.what, *self.where)
        return " ".join((*sentences, *self.system_messages, *self.prefixes, *self.topics))


WORDS = msgspec.toml.decode(Path(__file__).with_name("words.toml").read_bytes(), type=WordLists)
