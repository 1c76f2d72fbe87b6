"""Reads the page's files once, with strong ETags. Browsers get their lines without indentation and
comments.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
INDEX = "index.html"
TYPES = {  # the response appends the charset to text
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_INDENTS = re.compile(rb"^[ \t]+", re.MULTILINE)
# a line of its own, or behind code: without quotes, so that no string ends in it
_COMMENTS = re.compile(rb"^//.*|(?<=[;,{(\])]) // [^\"'`\n]*$", re.MULTILINE)
_EMPTY_LINES = re.compile(rb"\n{2,}")
_CSS_SPACES = re.compile(rb" ?([{};,]|:(?= )) ?")


class PageFile(msgspec.Struct, frozen=True):
    data: bytes
    media_type: str
    etag: str

    def is_fresh(self, if_none_match: str) -> bool:
        """Whether an If-None-Match header has this file's tag."""
        tags = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
        return self.etag in tags or "*" in tags


def read_files() -> dict[str, PageFile]:
    """Returns the files by name."""
    paths = sorted(path for path in FOLDER.iterdir() if path.suffix in TYPES)
    return {path.name: _file(path) for path in paths}


def compact(suffix: str, data: bytes) -> bytes:
    """Returns the text without what browsers do not need. No line of a script may begin within a
    string.
    """
    data = _INDENTS.sub(b"", data)
    if suffix == ".js":
        data = _COMMENTS.sub(b"", data)
    elif suffix == ".css":
        data = _CSS_SPACES.sub(rb"\1", data)
    return _EMPTY_LINES.sub(b"\n", data)


def _file(path: Path) -> PageFile:
    data = compact(path.suffix, path.read_bytes())
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return PageFile(data, TYPES[path.suffix], f'"{digest}"')
