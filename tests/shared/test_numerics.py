from __future__ import annotations

import msgspec
import pytest

from shared.numerics import Numerics

EXACT = Numerics("exact", "cpu-avx512", "bfloat16", "1")
FAST = Numerics("fast", "cpu-avx512", "bfloat16", "1")
replace = msgspec.structs.replace


@pytest.mark.parametrize(
    ("one", "other", "may_share"),
    [
        (EXACT, EXACT, True),
        (EXACT, replace(EXACT, device="sm90"), False),
        (EXACT, replace(EXACT, kernels="2"), False),
        (EXACT, replace(EXACT, dtype="float32"), False),
        (FAST, replace(FAST, device="sm90", kernels="2"), True),
        (FAST, replace(FAST, dtype="float32"), False),
        (FAST, replace(FAST, activations="fp8"), False),
        (FAST, replace(FAST, tp=2, sum_lanes=8), True),
        (EXACT, replace(EXACT, sum_lanes=8), False),
        (EXACT, replace(EXACT, activations="fp8"), False),
        (EXACT, replace(EXACT, kv_dtype="float8_e4m3fn"), False),
        (FAST, replace(FAST, kv_dtype="float8_e4m3fn"), False),
        (replace(FAST, kv_dtype="float8_e4m3fn"), replace(FAST, kv_dtype="float8_e4m3fn"), True),
        (FAST, EXACT, False),
    ],
)
def test_kv_is_shared_between_equal_numerics_or_in_fast_mode_by_dtype(
    one: Numerics, other: Numerics, may_share: bool
) -> None:
    assert one.may_share_kv(other) == other.may_share_kv(one) == may_share


def test_numerics_of_workers_that_know_no_kv_dtype_mean_that_of_activations() -> None:
    assert msgspec.convert(msgspec.to_builtins(EXACT)[:7], Numerics) == EXACT
    assert msgspec.to_builtins(EXACT)[7:] == [""]


@pytest.mark.parametrize(
    "bad",
    [
        ["exact", "sm90"],
        ["other", "sm90", "bf16", "1"],
        [1, 2, 3, 4],
        ["exact", "sm90", "bf16", "1", -1],
        ["exact", "sm90", "bf16", "1", 1, "plain", 0, 8],
    ],
)
def test_invalid_numerics_are_rejected_when_decoded(bad: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, Numerics)
