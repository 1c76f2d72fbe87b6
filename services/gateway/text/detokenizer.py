"""Token ids to text, piece by piece, never half a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
# An incomplete character is at most three bytes; a longer broken tail will never become one.
MAX_PENDING_TOKENS = 8


class Detokenizer:
    """`feed` gives a piece for each token that completes one, and withholds a tail that is not
    whole UTF-8; `flush` gives it out as U+FFFD.

    The pieces together are what `tokenizer.decode` makes of all tokens, by default without special
    ones. `DecodeStream` does the common case in 0.6 µs; this class adds the ending and the way
    on after bytes that are no UTF-8 at all. `context` are the tokens before: where text goes on,
    a decoder must not take its first space away.

    `whole_texts`, of `token_bytes`, saves most tokens of many models that: where nothing is
    withheld, their text is known. The text of the others does not depend on them, so neither
    `DecodeStream` nor `_context` has to hear of them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        skips_special_tokens: bool = True,
        whole_texts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skips_special_tokens
        self._whole_texts = whole_texts
        self._context = list(context)  # tokens of the last piece given out
        if self._context and self._decode(self._context).endswith(REPLACEMENT):
            self._context = []  # it ends amid a character, and would be given out again with it
        self._stream = DecodeStream(self._context, skip_special_tokens=self._skips)
        self._pending: list[int] = []  # tokens not given out yet

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        pieces = []
        for token_id in token_ids:
            if not self._pending and token_id in self._whole_texts:
                pieces.append(self._whole_texts[token_id])
                continue
            self._pending.append(token_id)
            piece = self._step(token_id)
            if piece:
                self._context, self._pending = self._pending, []
                pieces.append(piece)
        return pieces

    def flush(self) -> str:
        """What is left when no token follows."""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return text

    def _step(self, token_id: int) -> str | None:
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises a bare Exception when its prefix changes meaning
            piece = None
        if piece is None and len(self._pending) > MAX_PENDING_TOKENS:
            return self._give_up_waiting()
        return piece

    def _give_up_waiting(self) -> str | None:
        """A long tail without text: special tokens, or bytes that never become a character."""
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < 4 * MAX_PENDING_TOKENS:
            return None
        self._stream = DecodeStream(self._pending[-4:], skip_special_tokens=self._skips)
        self._context, self._pending = self._pending, []
        return text

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        both = self._decode(self._context + self._pending)
        return both[len(before) :] if both.startswith(before) else self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skips))
