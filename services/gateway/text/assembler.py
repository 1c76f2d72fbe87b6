"""From the tokens of one choice to the text that its client may see."""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStrings


class TextAssembler:
    """Detokenizer and stop strings in a row; counts the tokens up to the end of a match.

    Stop strings count only once `min_tokens` tokens are there.
    """

    def __init__(self, detokenizer: Detokenizer, stop: Sequence[str], *, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._stop_strings = StopStrings(stop)
        self._has_stop = bool(stop)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        return self._stop_strings.matched is not None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Tokens after a match are neither shown nor counted."""
        if not self._has_stop:
            self.num_tokens += len(token_ids)
            return self._detokenizer.feed(token_ids)
        pieces = []
        for token_id in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            pieces.append(self._show(self._detokenizer.feed((token_id,))))
        return "".join(pieces)

    def flush(self) -> str:
        """All that was held back, when no token follows; a match may still be found in it."""
        text = self._show(self._detokenizer.flush())
        return text + self._stop_strings.flush()

    def _show(self, text: str) -> str:
        return text if self.num_tokens < self._min_tokens else self._stop_strings.feed(text)
