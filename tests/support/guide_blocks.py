"""The code blocks of README.md and of the guides, and how each is tried.

A comment on the line before a block says how; blocks of shell code need one. The commands and the
syntax of all are checked. In tests/end_to_end:

    <!-- run -->              guides/test_guides.py runs it on a cluster of the demo model
    <!-- run: long -->        the same, in the long run, on a cluster of its own
    <!-- run: regions -->     the same, where the cluster has a region and a class of regions
    <!-- run: hosts -->       guides/test_guide_of_hosts.py runs it: a worker on a second host
    <!-- run: tls -->         guides/test_guide_of_hosts.py runs it: a cluster with TLS
    <!-- run: sites -->       guides/test_guide_of_sites.py runs it: two linked sites
    <!-- run: rotation -->    operations/test_rotation.py runs it: new secrets
    <!-- not run: REASON -->  why it cannot run in a test
    <!-- output -->           what the block before it printed; … stands for any text
    <!-- clients: NAME -->    scripts/test --clients runs it in the environment NAME

It imports the standard library alone: outside clients' environments use it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "services/guides"
ADDRESS = "http://127.0.0.1:8000"  # of `hearth up`, in the guides
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    path: Path
    line: int  # of the fence
    language: str
    mark: str  # empty without a comment
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def guides() -> list[Path]:
    return [ROOT / "README.md", *sorted(FOLDER.rglob("*.md"))]


def blocks_of(path: Path) -> Iterator[Block]:
    text = path.read_text()
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start()) + (2 if match["mark"] else 1)
        yield Block(path, line, match["language"], match["mark"] or "", match["text"])


def all_blocks() -> list[Block]:
    return [block for path in guides() for block in blocks_of(path)]


def client_blocks(environment: str) -> list[Block]:
    """Returns the blocks that `scripts/test --clients` runs in this environment."""
    return [each for each in all_blocks() if each.mark == f"clients: {environment}"]


def filled(text: str, *, url: str, api_key: str) -> str:
    """Returns a block with the address of a running cluster, and its API key in place of `…`."""
    text = text.replace(ADDRESS, url)
    return re.sub(r"(?<=_API_KEY=)…|(?<=api_key=\")…(?=\")", api_key, text)
