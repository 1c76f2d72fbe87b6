"""Converts token ids to text without the library's tokenizer, whose parse lets no thread run for
0.5 s.

A preparation process, or the one that checks a model's files, makes the table from the library's
tokenizer; the gateway gets it as a message. The library's decoders are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

from services.gateway.text.decoding.packed_texts import PackedTexts, RecentTexts
from services.gateway.text.decoding.token_bytes import TokenBytes
from shared.errors import HearthError

_EMPTY_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


class TokenTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """`spellings`: each token as decoders take it. `complete_texts`: of the tokens whose text does
    not depend on their neighbours. `special_ids`: tokens that answers leave out. `added_ids`: of
    added tokens, by their texts. `decoder`: of the tokenizer's JSON. `vocab_size`: with added
    tokens, without ids that have no token.
    """

    spellings: PackedTexts
    complete_texts: PackedTexts
    special_ids: frozenset[int]
    special_tokens: tuple[str, ...]
    added_ids: dict[str, int]
    decoder: bytes
    is_byte_level: bool
    vocab_size: int

    def added_token_id(self, text: str) -> int | None:
        """Returns the token that stands for this text alone, such as a marker of a template."""
        return self.added_ids.get(text)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        return TokenBytes(self.spellings, self.added_ids, is_byte_level=self.is_byte_level)

    def decode(self, token_ids: Sequence[int], *, skips_special: bool = False) -> str:
        """Decodes all tokens at once; an id without a token has no text. Raises HearthError for
        tokens on which the library fails: its panic is no Exception, and would end any task.
        """
        tokens = self.tokens_of(token_ids, skips_special=skips_special)
        try:
            decoder = self._decoder
            return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            reason = f"the model's decoder fails on {len(tokens)} tokens: {error}"
            raise HearthError(reason) from error

    def tokens_of(self, token_ids: Sequence[int], *, skips_special: bool = False) -> list[str]:
        """Returns the spellings that a decoder takes."""
        texts = self._shown if skips_special else self._spelled
        return [text for each in token_ids if (text := texts[each]) is not None]

    def text_alone(self, token_id: int, *, skips_special: bool = False) -> str:
        """Returns the text of this token, as `decode` does."""
        recent = self._shown_alone if skips_special else self._spelled_alone
        return recent[token_id] or ""

    @cached_property
    def complete(self) -> RecentTexts:
        """Returns the same as `complete_texts`, faster."""
        return RecentTexts(self.complete_texts.__getitem__)

    @cached_property
    def _spelled(self) -> RecentTexts:
        return RecentTexts(self.spellings.__getitem__)

    @cached_property
    def _shown(self) -> RecentTexts:
        skipped = self.special_ids
        return RecentTexts(lambda each: None if each in skipped else self.spellings[each])

    @cached_property
    def _spelled_alone(self) -> RecentTexts:
        return RecentTexts(lambda each: self.decode((each,)))

    @cached_property
    def _shown_alone(self) -> RecentTexts:
        return RecentTexts(lambda each: self.decode((each,), skips_special=True))

    def spelled(self, token_ids: Sequence[int]) -> list[str]:
        """Returns each token as the vocabulary spells it, for example `Ġhello`."""
        return [self.spellings[token_id] or "" for token_id in token_ids]

    @cached_property
    def _decoder(self) -> Decoder | None:
        fields = {"version": "1.0", "added_tokens": [], "model": _EMPTY_MODEL}
        source = msgspec.json.encode(fields | {"decoder": msgspec.Raw(self.decoder)})
        return Tokenizer.from_buffer(source).decoder
