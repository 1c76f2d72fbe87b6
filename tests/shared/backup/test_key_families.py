"""The table of what Redis holds is complete, and the guide has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.backup.key_families import KEY_FAMILIES, family_of

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "services/guides/backup.md"
BEGIN = "<!-- table: key families (tests/shared/backup/test_key_families.py) -->\n"
END = "<!-- end of table -->"
# A key in the sources: a string that begins with the name of all keys
KEY = re.compile(r"f?[\"'](hearth:[^\"'\s]*)[\"']")
STARTS = ("hearth:", "hearth:x:response")  # of keys, not keys
EXPRESSION = re.compile(r"\{[^}]*\}")


def table() -> str:
    rows = ["| key | contents | in a backup | else |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{each.pattern}` | {each.contents} | {each.treatment} | {each.lost} |"
        for each in KEY_FAMILIES
    ]
    return "\n".join(rows) + "\n"


def keys_in_sources() -> dict[str, str]:
    """Returns the keys that the product's code names, with an x for each expression."""
    found = {}
    for folder in ("services", "shared"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name in ("key_families.py", "redis_acl.py"):
                continue
            for key in KEY.findall(path.read_text()):
                found[EXPRESSION.sub("x", key)] = str(path.relative_to(ROOT))
    return {key: place for key, place in found.items() if key not in STARTS}


def test_every_key_of_the_sources_is_of_a_family():
    found = keys_in_sources()
    assert len(found) > 30
    assert {key: place for key, place in found.items() if family_of(key) is None} == {}


def test_guide_has_the_table():
    _, _, rest = GUIDE.read_text().partition(BEGIN)
    assert rest, "the guide has no table of key families"
    assert rest.partition(END)[0] == table()


@pytest.mark.parametrize("key", ["hearth:new", "hearth:acme:new", "other"])
def test_a_new_key_is_of_none(key: str):
    assert family_of(key) is None
