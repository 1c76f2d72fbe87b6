"""Finds registers that are overwritten while a tensor core may still read them, in SASS of Hopper.

An asynchronous product (HGMMA) whose first operand is in registers reads them after it is issued,
until a WARPGROUP.DEPBAR has waited for it (PTX ISA, wgmma.mma_async). The assembler keeps registers
of a value that only this product reads; not those of a loop's variable, which the next value
replaces before the wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LINE = re.compile(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?(.*?) ?;", re.MULTILINE)
PRODUCT = re.compile(r"HGMMA\S* R\d+, R(\d+), gdesc")
OPERAND_REGISTERS = 4
JUMP = re.compile(r"BRA\S* (?:\S+, )?0x([0-9a-f]+)")
WRITTEN = re.compile(r"(\S+) (?:!?U?PT?\d*, )?R(\d+)\b")
READ_ONLY = ("ST", "LDGSTS", "RED", "BAR", "BRA", "ISETP", "FSETP", "R2UR", "CCTL", "VOTE")
WIDTHS = {".128": 4, ".64": 2, ".WIDE": 2, ".M88.4": 4, ".M88.2": 2, ".MT88.4": 4, ".MT88.2": 2}


@dataclass(frozen=True)
class Instruction:
    address: int
    text: str  # without its predicate


def overwritten_operands(sass: str) -> list[str]:
    """Returns the products of which an operand's register is written before the next wait, along
    the code and once around a loop.
    """
    code = [Instruction(int(address, 16), text) for address, text in LINE.findall(sass)]
    found = []
    for number, each in enumerate(code):
        product = PRODUCT.match(each.text)
        if product is None:
            continue
        operand = set(range(int(product[1]), int(product[1]) + OPERAND_REGISTERS))
        if any(operand & written(later.text) for later in _until_wait(code, number + 1)):
            found.append(each.text)
    return found


def written(text: str) -> set[int]:
    """Returns the numbers of the registers that an instruction writes."""
    found = WRITTEN.match(text)
    if found is None or found[1].startswith(READ_ONLY):
        return set()
    columns = re.match(r"HGMMA\.64x(\d+)x", text)
    width = next((n for name, n in WIDTHS.items() if name in found[1]), 1)
    first = int(found[2])
    return set(range(first, first + (int(columns[1]) // 2 if columns else width)))


def _until_wait(code: list[Instruction], number: int) -> Iterator[Instruction]:
    """Follows the first jump backwards, that of the loop around the product."""
    places = {each.address: place for place, each in enumerate(code)}
    has_jumped = False
    while number < len(code):
        each = code[number]
        if each.text.startswith("WARPGROUP.DEPBAR"):
            return
        yield each
        jump = JUMP.match(each.text)
        target = int(jump[1], 16) if jump else each.address
        if target < each.address and not has_jumped:
            number, has_jumped = places[target], True
        else:
            number += 1
