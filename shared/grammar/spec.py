"""The grammar of a request on the wire: what the output of each choice must match."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

GRAMMAR_FEATURE = "grammar/1"  # required of workers that sample under a `GrammarSpec`
MAX_SOURCE_BYTES = 256 * 1024
MAX_STARTS = 16
MAX_START_TOKENS = 64

GrammarKind = Literal["json_schema", "regex", "lark"]
_TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
StartTokens = Annotated[tuple[_TokenId, ...], Meta(min_length=1, max_length=MAX_START_TOKENS)]


class ReasoningMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens around reasoning in an output. `opens` is empty if no token opens it. If
    `is_open`, the output begins inside reasoning.
    """

    opens: Annotated[tuple[_TokenId, ...], Meta(max_length=MAX_START_TOKENS)] = ()
    closes: StartTokens
    is_open: bool = False


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar of an output. Its `source` is in llguidance's form: a JSON Schema with its
    `x-guidance` options, a regular expression, or a Lark grammar.

    The grammar applies to what follows the first occurrence of one of the token sequences
    `starts_after` in the output; empty: to all output. Until then tokens are free, but if
    `is_required`, no stop token is sampled. After the grammar's end only a stop token follows, or
    if `repeats`, free tokens until the next occurrence. Inside `reasoning` no occurrence counts.
    """

    kind: GrammarKind
    source: Annotated[str, Meta(min_length=1, max_length=MAX_SOURCE_BYTES)]
    starts_after: Annotated[tuple[StartTokens, ...], Meta(max_length=MAX_STARTS)] = ()
    is_required: bool = True
    repeats: bool = False
    reasoning: ReasoningMarks | None = None

    @property
    def digest(self) -> bytes:
        """[16] of kind and source: equal grammars compile to the same automaton."""
        return blake2b(f"{self.kind}\0{self.source}".encode(), digest_size=16).digest()
