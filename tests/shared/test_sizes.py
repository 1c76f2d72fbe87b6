from __future__ import annotations

import re

import pytest

from shared.errors import ConfigError
from shared.sizes import parse_size, shortest_size


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


def test_shortest_size_is_read_as_the_same_bytes() -> None:
    assert shortest_size(4 << 20) == "4MiB"
    for num_bytes in (0, 1, 1023, 1024, 1 << 20, 3 << 29, 10**9, 5 << 40):
        assert parse_size(shortest_size(num_bytes)) == num_bytes
