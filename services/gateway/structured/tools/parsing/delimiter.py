"""The texts and patterns that open and close a field of a response template."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Annotated, Any

import msgspec
import regex
import structlog
from msgspec import Meta

from services.gateway.structured.tools.parsing.marker_tokens import MarkerTokens
from shared.errors import ConfigError

Anchor = Annotated[str, Meta(min_length=1)] | list[Annotated[str, Meta(min_length=1)]]
MAX_HELD_CHARS = 4096  # characters of text that may be a delimiter
MAX_PATTERN_CHARS = 1024  # takes 2 ms to compile; 20,000 block all threads for 0.15 s
MATCH_TIMEOUT_S = 0.005  # seconds of a search on the event loop, which usually takes microseconds
NUM_TRIES = 2  # the first may have waited for a core on a busy machine
MAX_TIMEOUTS = 8
REGAIN_S = 60.0
log = structlog.get_logger(__name__)

_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))  # the last one is U+3000
_ASCII = "".join(map(chr, range(128)))
_OTHER = "é一٣😀"  # a pattern that can start with one of them may start with any
_NEEDS_CONTEXT = regex.compile(r"\\[pPBGKX]|\(\?<[=!]|\(\?\w*[iaLu]|(?<!\[)\^")


class Patience:
    """The remaining timeouts of a template's patterns, since a checkpoint may contain one that
    never ends. After MAX_TIMEOUTS timeouts the patterns match nothing; each REGAIN_S restores one.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._regained_at = 0.0  # when all timeouts are restored

    @property
    def is_over(self) -> bool:
        return self._regained_at - self._now() > (MAX_TIMEOUTS - 1) * REGAIN_S

    def lose(self) -> tuple[None, bool]:
        """Counts a timeout. Returns the result of a search without a match."""
        self._regained_at = max(self._regained_at, self._now()) + REGAIN_S
        if self.is_over:
            log.warning("pattern_too_slow", effect="what it delimits is part of the content")
        return None, False


class Delimiter(msgspec.Struct, frozen=True):
    """The compiled form of a delimiter. `can_grow` is true if a match at the end of a text can
    become longer. `leads` matches the characters that a match can start with; None means all. A
    search that takes too long finds nothing.
    """

    pattern: Any
    can_grow: bool
    leads: Any = None
    is_at_start: bool = False
    patience: Patience = msgspec.field(default_factory=Patience)

    def search(self, text: str, start: int = 0, *, is_ended: bool) -> tuple[Any, bool]:
        """Returns the match, and whether more text may change it. A match that grows beyond
        MAX_HELD_CHARS is none.
        """
        if self.leads is not None and not self.is_at_start:
            lead = self.leads.search(text, start)
            if lead is None:
                return None, False
            start = lead.start()
        return self._tried(partial(self.pattern.search, text, start), text, is_ended)

    def match(self, text: str, *, is_ended: bool) -> tuple[Any, bool]:
        """Searches like `search`, but only at the start of the text."""
        return self._tried(partial(self.pattern.match, text), text, is_ended)

    def _tried(self, find: Callable[..., Any], text: str, is_ended: bool) -> tuple[Any, bool]:
        if self.patience.is_over:
            return None, False
        for _ in range(NUM_TRIES):
            with suppress(TimeoutError):
                found = find(partial=not is_ended, timeout=MATCH_TIMEOUT_S)
                return self._judged(found, text, is_ended)
        return self.patience.lose()

    def _judged(self, found: Any, text: str, is_ended: bool) -> tuple[Any, bool]:
        if found is None or is_ended:
            return found, False
        at_end = found.end() == len(text)
        is_pending = found.partial or (at_end and (self.can_grow or not found[0]))
        if is_pending and len(found[0]) > MAX_HELD_CHARS:
            return (None, False) if found.partial else (found, False)
        return found, is_pending


def delimiter(
    scope: str,
    literal: Anchor | None,
    pattern: str | None,
    markers: MarkerTokens,
    patience: Patience,
) -> Delimiter | None:
    """Returns the delimiter of one or several texts or of a pattern, or None without any. Raises
    ConfigError.
    """
    if literal is not None and pattern is not None:
        raise ConfigError(f"{scope}: has both a text and a pattern")
    if literal is not None:
        texts = [markers.replaced(each) for each in _listed(literal)]
        texts.sort(key=len, reverse=True)
        joined = "|".join(regex.escape(each) for each in texts)
        is_prefix = any(a != b and a.startswith(b) for a in texts for b in texts)
        return Delimiter(
            regex.compile(joined), can_grow=is_prefix, leads=_leads(joined), patience=patience
        )
    if pattern is None:
        return None
    marked = markers.replaced_pattern(pattern)
    return Delimiter(
        compiled(scope, marked),
        can_grow=True,
        leads=_leads(marked),
        is_at_start=marked.startswith(r"\A"),
        patience=patience,
    )


def compiled(scope: str, pattern: str) -> Any:
    """Returns the compiled pattern. Raises ConfigError if it is invalid or too long."""
    if len(pattern) > MAX_PATTERN_CHARS:
        most = f"the limit is {MAX_PATTERN_CHARS}"
        raise ConfigError(f"{scope}_pattern: has {len(pattern)} characters, {most}")
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigError(f"{scope}_pattern: not a regular expression: {error}") from error


@lru_cache(maxsize=256)
def _leads(pattern: str) -> Any:
    found = regex.compile(pattern, regex.DOTALL)
    if _NEEDS_CONTEXT.search(pattern) or found.match(""):
        return None
    if any(found.match(each, partial=True) for each in _OTHER if each not in pattern):
        return None
    known = sorted({*_ASCII, *_SPACES, *pattern})
    leads = "".join(each for each in known if found.match(each, partial=True))
    return regex.compile(f"[{regex.escape(leads, literal_spaces=True)}]") if leads else None


def _listed(anchor: Anchor) -> list[str]:
    return [anchor] if isinstance(anchor, str) else anchor
