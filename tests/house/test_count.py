"""The script that counts rooms, arrows and floors."""

from __future__ import annotations

import ast
from pathlib import PurePosixPath as Path

from tests.house.count import imports, shape

SOURCES = {
    "top/__init__.py": "",
    "top/a.py": "from top.b.c import Name\nimport top.d",
    "top/b/__init__.py": "",
    "top/b/c.py": "import os\nfrom top import d",
    "top/d.py": "class Name: ...",
    "other/e.py": "from top.a import x",
}


def test_rooms_arrows_and_floors_of_a_folder() -> None:
    trees = {Path(path): ast.parse(text) for path, text in SOURCES.items()}
    pairs = list(imports(trees))
    assert shape(pairs, list(trees), "top") == "3/3/3"  # a → b, a → d, b → d
    assert shape(pairs, list(trees), "top/b") == "1/0/1"
    assert shape(pairs, list(trees), "nothing") == "0/0/0"
