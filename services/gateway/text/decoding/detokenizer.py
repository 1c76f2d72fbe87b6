"""Converts token ids to text incrementally, never splitting a character."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.text.decoding.token_table import TokenTable

REPLACEMENT = "\ufffd"
# An incomplete character has at most three bytes; a longer invalid tail never becomes one.
MAX_PENDING_TOKENS = 8


class Detokenizer:
    """`feed` returns a delta for each token that completes text, and buffers a tail that is not
    complete UTF-8; `flush` returns that tail as U+FFFD.

    The joined deltas equal the text of all tokens, by default without special tokens. `context`:
    the preceding tokens; a decoder must not strip the first space of a continued text.
    `num_partial`: the last ones of them, which end inside a character: the first delta has this
    character, if it is completed, else U+FFFD.

    A token is decoded after those of the last delta, with and without it. Tokens with complete
    texts need none of this while no tail is buffered, and the text of others does not depend on
    them, so they are no context.
    """

    def __init__(
        self,
        tokens: TokenTable,
        context: Sequence[int] = (),
        *,
        num_partial: int = 0,
        skips_special_tokens: bool = True,
    ) -> None:
        self._tokens = tokens
        self._complete = tokens.complete
        self._skips = skips_special_tokens
        end = len(context) - num_partial
        self._pending: list[int] = []  # tokens not returned yet
        self._known_text = ""  # the context's complete characters, at the start of the next delta
        self._follow(list(context[:end]))
        if self._before.endswith(REPLACEMENT):
            self._follow([])  # it may be a character that the next token completes
        if num_partial:
            self.feed(context[end:])
            self._known_text = self._pending_text().rstrip(REPLACEMENT)

    def feed(self, token_ids: Sequence[int]) -> list[str]:
        deltas, complete = [], self._complete
        for token_id in token_ids:
            text = None if self._pending else complete[token_id]
            if text is not None:
                deltas.append(text)
                continue
            self._pending.append(token_id)
            delta = self._step()
            if delta:
                deltas.append(self._new_text(delta))
        return deltas

    def flush(self) -> str:
        """Returns the remaining text after the last token."""
        text = self._pending_text()
        self._follow(self._pending)
        return self._new_text(text)

    def _new_text(self, delta: str) -> str:
        known, self._known_text = self._known_text, ""
        return delta.removeprefix(known)

    def _step(self) -> str | None:
        both, before = self._decode(self._context + self._pending), self._before
        if len(both) > len(before) and both.startswith(before) and not both.endswith(REPLACEMENT):
            self._follow(self._pending)
            return both[len(before) :]
        if len(self._pending) > MAX_PENDING_TOKENS:
            return self._give_up_waiting()
        return None

    def _give_up_waiting(self) -> str | None:
        """Ends a long tail without text: special tokens, or bytes that never form a character."""
        text = self._pending_text()
        if not self._tokens.tokens_of(self._pending, skips_special=self._skips):
            self._pending = []
        elif not text.endswith(REPLACEMENT) or len(self._pending) >= 4 * MAX_PENDING_TOKENS:
            self._follow(self._pending)
            return text
        return None

    def _follow(self, context: list[int]) -> None:
        """Makes the next delta follow the text of these tokens, which is not waited for."""
        self._context, self._pending = context, []
        self._before = self._decode(context)

    def _pending_text(self) -> str:
        if not self._pending:
            return ""
        both = self._decode(self._context + self._pending)
        if both.startswith(self._before):
            return both[len(self._before) :]
        return self._decode(self._pending)

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        if len(token_ids) == 1:
            return self._tokens.text_alone(token_ids[0], skips_special=self._skips)
        return self._tokens.decode(token_ids, skips_special=self._skips)


def decode_with_offsets(tokens: TokenTable, token_ids: Sequence[int]) -> tuple[str, list[int]]:
    """Decodes a token prompt, including special tokens. Returns the text and the offsets. An
    incomplete character at its end is left out: the output may complete it.
    """
    detokenizer = Detokenizer(tokens, skips_special_tokens=False)
    num_complete = len(token_ids) - tokens.token_bytes.num_partial(token_ids)
    texts, offsets, end = [], [], 0
    for number, token_id in enumerate(token_ids):
        if number == num_complete:
            texts.append(detokenizer.flush())
            end += len(texts[-1])
        offsets.append(end)
        texts.append("".join(detokenizer.feed((token_id,))))
        end += len(texts[-1])
    rest = detokenizer.flush()
    texts.append(rest if num_complete == len(token_ids) else rest.rstrip(REPLACEMENT))
    return "".join(texts), offsets
