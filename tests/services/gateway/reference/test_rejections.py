"""The table of everything that rejects with 429, in services/gateway/OPERATING.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
GATEWAY = ROOT / "services" / "gateway"
REJECTION = re.compile(r"\bOverloaded\((?!\))|\bEXHAUSTED\[\w+\]\(")


def test_every_module_that_rejects_is_in_the_table() -> None:
    text = (GATEWAY / "OPERATING.md").read_text()
    _, table = text.split("These places reject a request with 429:")
    listed = set(re.findall(r"`([\w/]+\.py)`", table.partition("\n## ")[0]))
    rejecting = {
        path
        for folder in (GATEWAY, ROOT / "services" / "scheduler", ROOT / "shared")
        for path in folder.rglob("*.py")
        if REJECTION.search(re.sub(r"case .*|class .*", "", path.read_text()))
    }
    found = {
        path.relative_to(GATEWAY if GATEWAY in path.parents else ROOT).as_posix()
        for path in rejecting
    }
    assert found == listed
