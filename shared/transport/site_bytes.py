"""The bytes that one connection exchanges with other sites. No I/O."""

from __future__ import annotations

from collections import Counter


class SiteBytes:
    """Counts encoded messages, without their subjects, headers and what NATS and TLS add.

    `sent[ANY]` went to every site whose link was connected.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()  # by site
        self.received: Counter[str] = Counter()
