"""Rules of the source that it does not keep everywhere yet: `exceptions.json` names where, and may
only become shorter.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("services", "shared", "kernels")
MAX_OWN_IMPORTS = 40
EXCEPTIONS = json.loads((Path(__file__).parent / "exceptions.json").read_text())


@cache
def modules(folder: str) -> dict[str, ast.Module]:
    """The syntax trees of a folder, by path."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """Statements at any depth; not expressions, which are most of a tree."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, name, ()):
            if isinstance(each, ast.stmt):
                yield each
            yield from statements(each)


def own_imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in statements(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(each.name for each in node.names)
    return {each for each in found if each.partition(".")[0] in (*PRODUCT, "benchmarks", "tests")}


def class_names_used_again() -> Iterator[str]:
    """Public classes of one name in several modules."""
    places = defaultdict(set)
    for folder in PRODUCT:
        for path, tree in modules(folder).items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].add(path)
    return (name for name, paths in places.items() if len(paths) > 1)


def modules_with_many_imports() -> Iterator[str]:
    for folder in PRODUCT:
        for path, tree in modules(folder).items():
            if len(own_imports(tree)) > MAX_OWN_IMPORTS:
                yield path


def imports_of_tests(folder: str) -> Iterator[str]:
    """Modules that import more of the tests than their library, `tests.support`."""
    for path, tree in modules(folder).items():
        names = [each.split(".") for each in own_imports(tree)]
        if any(head == "tests" and rest[:1] != ["support"] for head, *rest in names):
            yield path


RULES = {
    "a class name is used once": class_names_used_again,
    f"a module imports at most {MAX_OWN_IMPORTS} others": modules_with_many_imports,
    "benchmarks import tests.support alone": partial(imports_of_tests, "benchmarks"),
    "tests.support imports no other tests": partial(imports_of_tests, "tests/support"),
}


def test_rules_are_kept_but_for_the_exceptions() -> None:
    """All in one test: two processes would parse the sources twice."""
    found = {rule: set(exceptions()) for rule, exceptions in RULES.items()}
    allowed = {rule: set(EXCEPTIONS[rule]) for rule in RULES}
    new = {rule: sorted(found[rule] - allowed[rule]) for rule in RULES}
    gone = {rule: sorted(allowed[rule] - found[rule]) for rule in RULES}
    assert not any(new.values()), f"new exceptions: {new}"
    assert not any(gone.values()), f"no exceptions any more, delete their lines: {gone}"
