"""What a check of a receipt has found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

# open: it could not be compared, which says nothing against the receipt
Verdict = Literal["ok", "wrong", "open"]
HOLDS, WRONG, OPEN = 0, 1, 3  # exit statuses; 2 is that of wrong arguments


class Finding(msgspec.Struct, frozen=True):
    check: str
    verdict: Verdict
    text: str

    @property
    def line(self) -> str:
        return f"{self.check:<10} {self.verdict:<6} {self.text}"


def exit_status(findings: Iterable[Finding]) -> int:
    """Returns the status of the worst finding."""
    verdicts = {each.verdict for each in findings}
    if "wrong" in verdicts:
        return WRONG
    return OPEN if "open" in verdicts else HOLDS
