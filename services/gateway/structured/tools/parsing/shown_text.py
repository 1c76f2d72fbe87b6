"""Content and reasoning as the client sees them. Spaces next to a delimiter are removed with it, so
spaces at the end of a text are held back.
"""

from __future__ import annotations

from services.gateway.output.events import ReasoningDelta, TextDelta
from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from services.gateway.structured.tools.parsing.response_template import Kind, TemplateRegion

MAX_HELD_SPACES = 4096


class ShownText:
    """The text of one choice. `skips_spaces` is true if the text follows a delimiter."""

    def __init__(self, choice_index: int, markers: MarkerTokens, *, skips_spaces: bool) -> None:
        self.skips_spaces = skips_spaces
        self._choice = choice_index
        self._markers = markers
        self._spaces = ""
        self._join = ""
        self._kinds: set[str] = set()  # kinds that were shown

    @property
    def holds_spaces(self) -> bool:
        return bool(self._spaces)

    def open(self, region: TemplateRegion) -> str:
        """Opens a region at a delimiter. Returns the spaces before it."""
        spaces, self._spaces = self._spaces, ""
        self.skips_spaces = True
        if region.kind != "calls":
            self._join = region.join if region.kind in self._kinds else ""
        return spaces

    def leave(self) -> None:
        self._spaces = ""
        self.skips_spaces = True

    def of(self, kind: Kind, text: str) -> TextDelta | ReasoningDelta | None:
        """Returns the delta to show, or None if there is none yet or the kind is not shown."""
        if not text or kind not in ("content", "thinking"):
            return None
        text = self._markers.restored(self._spaces + text)
        self._spaces = ""
        if self.skips_spaces:
            text = text.lstrip()
            if not text:
                return None
            self.skips_spaces = False
        bare = text.rstrip()
        if len(text) - len(bare) <= MAX_HELD_SPACES:
            text, self._spaces = bare, text[len(bare) :]
        return self._delta(kind, text)

    def literal(self, text: str) -> TextDelta | ReasoningDelta | None:
        """Returns content whose spaces are a part of it, whatever follows them."""
        return self._delta("content", self._markers.restored(text))

    def rest(self, kind: Kind) -> TextDelta | ReasoningDelta | None:
        """Returns the spaces at the end of all text, which no delimiter follows."""
        text, self._spaces = self._spaces, ""
        return self._delta(kind, text) if kind in ("content", "thinking") else None

    def _delta(self, kind: Kind, text: str) -> TextDelta | ReasoningDelta | None:
        if not text:
            return None
        text, self._join = self._join + text, ""
        self._kinds.add(kind)
        if kind == "content":
            return TextDelta(self._choice, (text,))
        return ReasoningDelta(self._choice, (text,))
