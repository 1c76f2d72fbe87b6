"""Sizes in bytes as people write them: 8GiB, 512MB, 1.5g, 4096; and shares: 0.45, 45%."""

from __future__ import annotations

import re
from fractions import Fraction

from shared.errors import ConfigError

EXAMPLES = "8GiB, 512MB, 1.5g or 4096 (bytes)"
_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,18})?) ?%|(\d\.\d{1,18})", re.ASCII)
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) ?([kmgt]?)(i?b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Returns the bytes. KB, MB, GB and TB are powers of 1000; KiB, Ki and k are powers of 1024.
    Raises ConfigError.
    """
    found = _SIZE.fullmatch(text.strip())
    number, unit, kind = found.groups() if found is not None else ("", "", "i")
    if not unit and (kind.lower() not in ("", "b") or "." in number):
        raise ConfigError(f"{text!r} is not a size such as {EXAMPLES}")
    base = 1000 if kind.lower() == "b" else 1024
    return int(Fraction(number) * base ** _POWERS[unit.lower()])


def parse_size_or_share(text: str) -> int | Fraction:
    """Returns bytes, or the share of a memory that `0.45` or `45%` is: more than 0, at most 1.
    Raises ConfigError.
    """
    found = _SHARE.fullmatch(text.strip())
    if found is None:
        amount: int | Fraction = _size_in(text)
    else:
        percent, ratio = found.groups()
        amount = Fraction(ratio) if percent is None else Fraction(percent) / 100
    if amount == 0:
        raise ConfigError(f"{text!r} is no memory")
    if isinstance(amount, Fraction) and amount > 1:
        raise ConfigError(f"{text!r} is more than all of a memory")
    return amount


def bytes_of(amount: int | Fraction, total: int) -> int:
    """Returns the bytes of a size, or of a share of `total`."""
    return int(amount * total) if isinstance(amount, Fraction) else amount


def _size_in(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError:
        raise ConfigError(
            f"{text!r} is neither a size such as {EXAMPLES}, nor a share such as 0.45 or 45%"
        ) from None


def shortest_size(num_bytes: int) -> str:
    """Returns the bytes as `parse_size` reads them, exact and in the largest unit: 4MiB."""
    for unit, power in reversed(_POWERS.items()):
        if unit and num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{unit.upper()}iB"
    return str(num_bytes)
