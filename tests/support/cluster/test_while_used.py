"""A shared value starts with its first user, ends before a test without it, and starts again."""

from __future__ import annotations

import pytest

pytest_plugins = ("pytester",)
CONFTEST = """
from contextlib import contextmanager
from pathlib import Path
import pytest
from tests.support.cluster.while_used import WhileUsed

SHARED = WhileUsed("value", Path(__file__).parent)
told = []

def pytest_collection_modifyitems(items):
    SHARED.gather_users(items)

@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    told.append(item.name)
    SHARED.end_unless_used(nextitem)

def pytest_unconfigure():
    print("told", *told)

@contextmanager
def running():
    told.append("(")
    yield 1
    told.append(")")

@pytest.fixture(scope="module")
def value(request):
    return SHARED.value(request, running)
"""
OWN = "import pytest\n@pytest.fixture\ndef value(): return 2\n"


def test_value_ends_before_a_module_without_it(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        test_a="def test_a(): pass",
        test_b="def test_b(value): pass\ndef test_b_without(): pass",
        test_c=OWN + "def test_c(value): assert value == 2",
        test_d="def test_d(value): assert value == 1",
        test_e="def test_e(): pass",
    )
    result = pytester.runpytest("-s", "-p", "no:asyncio")
    result.stdout.fnmatch_lines("*told test_a ( test_b test_b_without test_d ) test_c test_e")


def test_value_ends_with_its_session(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        test_b="def test_b(value): assert not value", test_d="def test_d(value): pass"
    )
    result = pytester.runpytest("-s", "-x", "-p", "no:asyncio")
    result.stdout.fnmatch_lines("*told ( ) test_b")
