"""The bytes that one connection exchanges with other sites, and the sites from which it takes
nothing. No I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from shared.errors import SenderMismatch


class SiteBytes:
    """Counts encoded messages, without their subjects, headers and what NATS and TLS add.

    `sent[ANY]` went to every site whose link was connected.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()  # by site
        self.received: Counter[str] = Counter()


class RefusedSites:
    """Sites that cannot be told from another one, each with the reason. Their states still arrive:
    these show when it is over.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        # Called with a site and the reason for which one of its states was refused.
        self.on_state: Callable[[str, str], None] = lambda site, reason: None

    def check(self, site: str) -> None:
        """Raises SenderMismatch if nothing is taken from the site."""
        if site in self.reasons:
            raise SenderMismatch(f"nothing is taken from site {site}: {self.reasons[site]}")
