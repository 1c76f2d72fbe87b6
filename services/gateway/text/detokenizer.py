"""Converts token ids to text incrementally, never splitting a character."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

REPLACEMENT = "\ufffd"
# An incomplete character has at most three bytes; a longer invalid tail never becomes one.
MAX_PENDING_TOKENS = 8


class Detokenizer:
    """`feed` returns a delta for each token that completes text, and buffers a tail that is not
    complete UTF-8; `flush` returns that tail as U+FFFD.

    The joined deltas equal `tokenizer.decode` of all tokens, by default without special tokens.
    `DecodeStream` handles the common case in 0.6 µs; this class adds the end of the text and the
    recovery after invalid UTF-8. `context`: the preceding tokens; a decoder must not strip the
    first space of a continued text. `num_partial`: the last ones of them, which end inside a
    character: the first delta has this character, if it is completed, else U+FFFD.

    `complete_texts`, from `token_bytes`, avoids that cost for most tokens of many models: while no
    tail is buffered, their text is known. The text of other tokens does not depend on these, so
    neither `DecodeStream` nor `_context` includes them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        context: Sequence[int] = (),
        *,
        num_partial: int = 0,
        skips_special_tokens: bool = True,
        complete_texts: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skips_special_tokens
        self._complete_texts = complete_texts
        end = len(context) - num_partial
        self._context = list(context[:end])  # tokens of the last delta returned
        if self._context and self._decode(self._context).endswith(REPLACEMENT):
            self._context = []  # DecodeStream takes it for a partial character and repeats the text
        self._stream = DecodeStream(self._context, skip_special_tokens=self._skips)
        self._pending: list[int] = []  # tokens not returned yet
        self._known_text = ""  # at the start of the next delta: the context's complete characters
        if num_partial:
            self.feed(context[end:])
            self._known_text = self._pending_text().rstrip(REPLACEMENT)

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        deltas = []
        for token_id in token_ids:
            if not self._pending and token_id in self._complete_texts:
                deltas.append(self._complete_texts[token_id])
                continue
            self._pending.append(token_id)
            delta = self._step(token_id)
            if delta:
                self._context, self._pending = self._pending, []
                deltas.append(self._new_text(delta))
        return deltas

    def flush(self) -> str:
        """Returns the remaining text after the last token."""
        text = self._pending_text()
        self._context, self._pending = self._pending, []
        return self._new_text(text)

    def _new_text(self, delta: str) -> str:
        known, self._known_text = self._known_text, ""
        return delta.removeprefix(known)

    def _step(self, token_id: int) -> str | None:
        try:
            delta = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises a bare Exception when its prefix changes meaning
            delta = None
        if delta is None and len(self._pending) > MAX_PENDING_TOKENS:
            return self._give_up_waiting()
        return delta

    def _give_up_waiting(self) -> str | None:
        """Ends a long tail without text: special tokens, or bytes that never form a character."""
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
