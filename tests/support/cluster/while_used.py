"""A fixture that modules share and that ends before the first test that does without it.

One of the session would go on to the end of its process: an idle cluster takes a tenth of a core.

    SHARED = WhileUsed[Cluster]("cluster", Path(__file__).parent)

    def pytest_collection_modifyitems(items):
        SHARED.gather_users(items)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(nextitem):
        SHARED.end_unless_used(nextitem)

    @pytest.fixture(scope="module")
    def cluster(request):
        return SHARED.value(request, run_cluster)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Generic, TypeVar

import pytest

T = TypeVar("T")


class WhileUsed(Generic[T]):
    """A value, started when a module asks for it first, and again after it has ended."""

    def __init__(self, fixture_name: str, folder: Path) -> None:
        self._fixture_name = fixture_name
        self._folder = folder
        self._modules = set[Path]()
        self._entered = ExitStack()
        self._values = list[T]()

    def gather_users(self, items: list[pytest.Item]) -> None:
        """Lets all tests of modules that use the fixture follow the first of them."""
        self._modules = {item.path for item in items if self._uses(item)}
        users = [item for item in items if item.path in self._modules]
        if users:
            first = items.index(users[0])
            others = [item for item in items[first:] if item.path not in self._modules]
            items[first:] = users + others

    def value(
        self, request: pytest.FixtureRequest, start: Callable[[], AbstractContextManager[T]]
    ) -> T:
        if not self._values:
            self._values.append(self._entered.enter_context(start()))
            request.session.addfinalizer(self._end)
        return self._values[0]

    def end_unless_used(self, nextitem: pytest.Item | None) -> None:
        if nextitem is not None and nextitem.path not in self._modules:
            self._end()

    def _end(self) -> None:
        self._values.clear()
        self._entered.close()

    def _uses(self, item: pytest.Item) -> bool:
        """Whether the item's module takes the fixture of its folder, not one of its own."""
        return (
            self._fixture_name in getattr(item, "fixturenames", ())
            and self._folder in item.path.parents
            and not hasattr(getattr(item, "module", None), self._fixture_name)
        )
