from __future__ import annotations

import pytest

from kernels.integers import cdiv, next_power_of_2


@pytest.mark.parametrize(("size", "blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2)])
def test_blocks_cover_the_size(size: int, blocks: int) -> None:
    assert cdiv(size, 16) == blocks


@pytest.mark.parametrize(("size", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (4097, 8192)])
def test_next_power_of_two(size: int, power: int) -> None:
    assert next_power_of_2(size) == power
