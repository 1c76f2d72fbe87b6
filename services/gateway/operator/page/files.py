"""Reads the page's files once, with strong ETags."""

from __future__ import annotations

import hashlib
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


class PageFile(msgspec.Struct, frozen=True):
    data: bytes
    media_type: str
    etag: str

    def is_fresh(self, if_none_match: str) -> bool:
        """Whether an If-None-Match header has this file's tag."""
        tags = {each.strip().removeprefix("W/") for each in if_none_match.split(",")}
        return self.etag in tags or "*" in tags


def read_files(folder: Path = FOLDER) -> dict[str, PageFile]:
    """Returns the files by name."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in TYPES)
    return {path.name: _file(path) for path in paths}


def _file(path: Path) -> PageFile:
    data = path.read_bytes()
    digest = hashlib.blake2b(data, digest_size=16).hexdigest()
    return PageFile(data, TYPES[path.suffix], f'"{digest}"')
