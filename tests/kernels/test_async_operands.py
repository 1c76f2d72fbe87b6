"""The check of machine code for operands that are overwritten too early."""

from __future__ import annotations

import pytest

from tests.kernels.support.async_operands import overwritten_operands, written

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR16].tnspB, R24, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def sass(*instructions: str) -> str:
    lines = (f"        /*{16 * n:04x}*/    {text} ;" for n, text in enumerate(instructions))
    return "\n".join(lines)


@pytest.mark.parametrize("write", ["FADD R121, R1, R2", "@!P0 LDG.E.128 R120, desc[UR4][R2.64]"])
def test_write_before_the_wait_is_found(write: str) -> None:
    assert overwritten_operands(sass(PRODUCT, write, WAIT)) == [PRODUCT]
    assert overwritten_operands(sass(PRODUCT, WAIT, write)) == []


def test_write_at_the_start_of_a_loop_is_found() -> None:
    """The product's wait is in the next iteration."""
    early, late = "MOV R123, R5", "FADD R1, R2, R3"
    assert overwritten_operands(sass(early, WAIT, late, PRODUCT, "@P0 BRA 0x0")) == [PRODUCT]
    assert overwritten_operands(sass(WAIT, early, late, PRODUCT, "@P0 BRA 0x0")) == []


def test_other_registers_and_reads_are_allowed() -> None:
    others = ("FADD R124, R120, R2", "ST.E [R2.64], R121", "ISETP.GE.AND P0, PT, R120, R3, PT")
    assert overwritten_operands(sass(PRODUCT, *others, WAIT)) == []


def test_operands_in_shared_memory_are_not_meant() -> None:
    product = "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR16], R88, gsb0"
    assert overwritten_operands(sass(product, "FADD R16, R1, R2", WAIT)) == []


def test_written_registers() -> None:
    assert written(PRODUCT) == set(range(24, 88))
    assert written("SHFL.BFLY PT, R144, R13, 0x2, 0x1f") == {144}
    assert written("LDS.64 R8, [R2]") == {8, 9}
    assert written("LDGSTS.E.BYPASS.128 [R157], desc[UR36][R20.64], P4") == set()
