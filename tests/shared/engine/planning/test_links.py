"""Tables of hosts and links."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.engine.parallel.links import (
    SHARED_MEMORY,
    Host,
    HostLink,
    Link,
    LinkTable,
    decode_links,
    read_links,
)

TOML = """
[[hosts]]
name = "a"
num_ranks = 2

[[hosts]]
name = "b"
num_ranks = 1

[[links]]
hosts = ["a", "b"]
link = { latency_s = 0.01, bytes_per_s = 125e6 }
"""


def test_table_survives_json_and_toml(tmp_path: Path) -> None:
    link = HostLink(("a", "b"), Link(0.01, 125e6))
    table = LinkTable((Host("a", 2, SHARED_MEMORY), Host("b", 1)), (link,))
    assert decode_links(msgspec.json.encode(table)) == table
    (tmp_path / "links.toml").write_text(TOML)
    assert read_links(tmp_path / "links.toml") == table
    with pytest.raises(ValueError, match="/dev/zero has more than 1048576 bytes"):
        read_links(Path("/dev/zero"))


def test_link_that_was_not_measured_is_named() -> None:
    table = LinkTable((Host("a", 1), Host("b", 1)))
    with pytest.raises(ValueError, match="between a and b is not in the table"):
        table.between(*table.hosts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a table of links: Input data was truncated"),
        ('{"hosts": []}', "1 to 8 of different names"),
        ('{"hosts": [HOST, HOST]}', "1 to 8 of different names"),
        ('{"hosts": [HOST], "links": [{"hosts": ["a", "b"], "link": LINK}]}', "between a and b"),
        ('{"hosts": [HOST], "links": [{"hosts": ["a", "a"], "link": LINK}]}', "between a and a"),
        ('{"hosts": [HOST], "speed": 1}', "unknown field `speed`"),
        (
            '{"hosts": [{"name": "a", "num_ranks": 0, "inside": LINK}]}',
            r"`int` >= 1 - at `\$.hosts\[0\].num_ranks`",
        ),
    ],
)
def test_bad_tables_are_rejected(text: str, message: str) -> None:
    link = '{"latency_s": 0.1, "bytes_per_s": 1e9}'
    host = f'{{"name": "a", "num_ranks": 2, "inside": {link}}}'
    with pytest.raises(ValueError, match=message):
        decode_links(text.replace("HOST", host).replace("LINK", link).encode())


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"links.json: No such file"):
        read_links(tmp_path / "links.json")
    (tmp_path / "links.toml").write_bytes(b"\xff[")
    with pytest.raises(ValueError, match="not a table of links"):
        read_links(tmp_path / "links.toml")
