from __future__ import annotations

import random

from shared.engine.batching.step_limit import FLOOR_TOKENS, LEAST_PATIENCE, StepLimit


def succeed(limit: StepLimit, num_steps: int) -> None:
    for _ in range(num_steps):
        limit.succeeded()


def test_failures_halve_the_tokens_of_a_step_down_to_a_floor() -> None:
    limit = StepLimit(2048)
    found = []
    for num_tokens in (2048, 1024, 100, 50, 25, 16, 1):
        limit.lower(num_tokens)
        found.append(limit.tokens)
    assert found == [1024, 512, 50, 25, FLOOR_TOKENS, FLOOR_TOKENS, FLOOR_TOKENS]
    small = StepLimit(8)
    small.lower(8)
    assert (small.tokens, small.floor, small.is_lowered) == (8, 8, False)


def test_successes_restore_the_tokens_later_after_each_failure() -> None:
    limit = StepLimit(64)
    for patience in (2 * LEAST_PATIENCE, 4 * LEAST_PATIENCE):
        limit.lower(64)
        succeed(limit, patience - 1)
        assert limit.tokens == 32
        succeed(limit, 1)
        assert (limit.tokens, limit.is_lowered) == (64, False)
    succeed(limit, 4 * LEAST_PATIENCE)  # it halves where all tokens are allowed
    limit.lower(64)
    succeed(limit, 4 * LEAST_PATIENCE)
    assert limit.tokens == 64


def test_a_size_that_never_fits_is_tried_seldom() -> None:
    limit, draw, num_failures = StepLimit(2048), random.Random(1), 0
    for _ in range(20_000):
        num_tokens = draw.randint(1, limit.tokens)
        if num_tokens > 300:
            num_failures += 1
            limit.lower(num_tokens)
        else:
            limit.succeeded()
    assert num_failures < 40
    succeed(limit, 20_000)
    assert limit.tokens == 2048
