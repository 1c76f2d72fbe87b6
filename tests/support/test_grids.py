"""The short run keeps each value of each parameter of a grid that is thinned."""

from __future__ import annotations

import inspect
from itertools import product

import pytest

from tests.support.grids import covering, in_one_test


@pytest.mark.parametrize("lengths", [(5, 2, 2), (4, 2, 2), (3,), (1, 1), (3, 4)])
def test_every_value_of_a_grid_stays_in_few_cells(lengths: tuple[int, ...]) -> None:
    axes = [[(str(axis), value) for value in range(length)] for axis, length in enumerate(lengths)]
    cells = [frozenset(cell) for cell in product(*axes)]
    chosen = covering(cells)
    assert len(chosen) == max(lengths)
    assert frozenset().union(*(cells[index] for index in chosen)) == frozenset().union(*cells)


def test_two_cells_differ_in_every_parameter() -> None:
    cells = [frozenset(enumerate(cell)) for cell in product("abc", "de", "fgh")]
    assert {cells[index] for index in covering(cells, 2)} == {
        frozenset(enumerate("adf")),
        frozenset(enumerate("beg")),
    }


@pytest.mark.each_value
@pytest.mark.parametrize("second", "ab")
@pytest.mark.parametrize("first", range(3))
def test_grid(request: pytest.FixtureRequest, first: int, second: str) -> None:
    """A cell knows whether it belongs to the short run."""
    is_long = request.node.get_closest_marker("long") is not None
    assert is_long == ((first, second) not in {(0, "a"), (1, "b"), (2, "a")})


async def test_one_test_of_all_cases_notes_the_one_that_fails() -> None:
    seen: list[tuple[int, ...]] = []

    @in_one_test(("a", "b"), [(1, 1), (2, 3), (4, 4)])
    def check(a: int, b: int, fixture: int) -> None:
        seen.append((a, b, fixture))
        assert a == b

    @in_one_test("a", [5, 6])
    async def check_later(a: int) -> None:
        seen.append((a,))
        assert a < 6

    assert [*inspect.signature(check).parameters] == ["fixture"]
    assert not inspect.signature(check_later).parameters
    with pytest.raises(AssertionError) as caught:
        check(fixture=7)
    assert caught.value.__notes__ == ["case: {'a': 2, 'b': 3}"]
    with pytest.raises(AssertionError) as caught:
        await check_later()
    assert caught.value.__notes__ == ["case: {'a': 6}"]
    assert seen == [(1, 1, 7), (2, 3, 7), (5,), (6,)]
