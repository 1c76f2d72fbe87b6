from __future__ import annotations

import re
from fractions import Fraction

import pytest

from shared.errors import ConfigError
from shared.sizes import bytes_of, parse_size, parse_size_or_share, shortest_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("80GiB", 80 << 30),
        (" 80 gib ", 80 << 30),
        ("8Gi", 8 << 30),
        ("1.5g", 3 << 29),
        ("1.5 gb", 1_500_000_000),
        ("512MB", 512_000_000),
        ("10k", 10 << 10),
        ("2T", 2 << 40),
        ("7B", 7),
        ("0.1GiB", 107_374_182),
    ],
)
def test_sizes_are_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "much", "80GiBs", "-1GiB", "1e9", "GiB", "5i", "5iB", "1.5", "1,5g", "\u0665"]
)
def test_other_sizes_are_an_error_that_shows_some(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape("size such as 8GiB, 512MB, 1.5g or 4096")):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("36GiB", 36 << 30),
        ("1", 1),
        ("0.45", Fraction(45, 100)),
        (" 45% ", Fraction(45, 100)),
        ("12.5 %", Fraction(1, 8)),
        ("1.0", Fraction(1)),
        ("100%", Fraction(1)),
        ("1.5g", 3 << 29),
    ],
)
def test_a_share_has_a_point_or_a_percent_sign(text: str, amount: int | Fraction) -> None:
    found = parse_size_or_share(text)
    assert (found, type(found)) == (amount, type(amount))
    assert bytes_of(found, 800) == (amount if isinstance(amount, int) else int(800 * amount))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0", "is no memory"),
        ("0%", "is no memory"),
        ("0.0", "is no memory"),
        ("1.5", "is more than all"),
        ("101%", "is more than all"),
        ("half", "neither a size such as 8GiB"),
        ("-45%", "neither a size such as 8GiB"),
        ("", "nor a share such as 0.45 or 45%"),
    ],
)
def test_other_shares_are_an_error(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_size_or_share(text)


def test_shortest_size_is_read_as_the_same_bytes() -> None:
    assert shortest_size(4 << 20) == "4MiB"
    for num_bytes in (0, 1, 1023, 1024, 1 << 20, 3 << 29, 10**9, 5 << 40):
        assert parse_size(shortest_size(num_bytes)) == num_bytes
