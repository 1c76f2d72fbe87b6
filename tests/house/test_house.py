"""Rules of the source that it does not keep everywhere yet: `exceptions.json` names where, and may
only become shorter.
"""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("services", "shared", "kernels")
MAX_OWN_IMPORTS = 40
EXCEPTIONS = json.loads((Path(__file__).parent / "exceptions.json").read_text())


# By lines: to parse the sources takes five seconds. One in a string counts, too.
CLASS = re.compile(r"^class ([A-Za-z_]\w*)", re.MULTILINE)
IMPORT = re.compile(r"^\s*(?:from ([\w.]+) import\b|import ([\w., ]+))", re.MULTILINE)


@cache
def sources(folder: str) -> dict[str, str]:
    """The modules of a folder, by path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def own_imports(source: str) -> set[str]:
    names = set[str]()
    for package, modules in IMPORT.findall(source):
        names |= {package} if package else {each.split()[0] for each in modules.split(",")}
    return {each for each in names if each.partition(".")[0] in (*PRODUCT, "benchmarks", "tests")}


def class_names_used_again() -> Iterator[str]:
    """Classes of one name in several modules."""
    places = defaultdict(set)
    for folder in PRODUCT:
        for path, source in sources(folder).items():
            for name in CLASS.findall(source):
                places[name].add(path)
    return (name for name, paths in places.items() if len(paths) > 1)


def modules_with_many_imports() -> Iterator[str]:
    for folder in PRODUCT:
        for path, source in sources(folder).items():
            if len(own_imports(source)) > MAX_OWN_IMPORTS:
                yield path


def imports_of_tests(folder: str) -> Iterator[str]:
    """Modules that import more of the tests than their library, `tests.support`."""
    for path, source in sources(folder).items():
        names = [each.split(".") for each in own_imports(source)]
        if any(head == "tests" and rest[:1] != ["support"] for head, *rest in names):
            yield path


def unguarded_yields() -> Iterator[str]:
    """Context managers that leave behind what they made if the block in them fails."""
    for folder in (*PRODUCT, "benchmarks", "tests"):
        for path, source in sources(folder).items():
            tree = ast.parse(source if "contextmanager\n" in source else "")
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    decorators = "".join(map(ast.unparse, node.decorator_list))
                    if "contextmanager" in decorators and any(map(_is_yield, node.body[:-1])):
                        yield f"{path}: {node.name}"


def _is_yield(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)


RULES = {
    "a class name is used once": class_names_used_again,
    f"a module imports at most {MAX_OWN_IMPORTS} others": modules_with_many_imports,
    "benchmarks import tests.support alone": partial(imports_of_tests, "benchmarks"),
    "context managers clean up after a failure": unguarded_yields,
    "tests.support imports no other tests": partial(imports_of_tests, "tests/support"),
}


@pytest.mark.parametrize("rule", RULES)
def test_rule_is_kept_but_for_the_exceptions(rule: str) -> None:
    found, allowed = sorted(RULES[rule]()), EXCEPTIONS[rule]
    assert sorted(set(found) - set(allowed)) == [], "new exceptions"
    assert sorted(set(allowed) - set(found)) == [], "no exceptions any more: delete their lines"
