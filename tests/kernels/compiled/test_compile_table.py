"""The kernels of all model families compile to what is recorded, and fit a Hopper GPU.

A class without a row fails: what a worker's start launches is recorded in a dry run. Long runs
compile all classes, with the installed Triton and with the oldest (scripts/test); other runs one
class of each kernel of a few models, unless its rows were recorded from the same source.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.device import IS_INTERPRETED
from shared.engine.models import FAMILIES
from shared.numerics import Mode

pytest.importorskip("triton")
if IS_INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from tests.kernels.compiled import tables
from tests.kernels.compiled.compile_table import (
    FILE,
    MODES,
    all_classes,
    by_kernel,
    classes_of,
    compiled,
)
from tests.kernels.compiled.family_sizes import CASES, SIZES
from tests.kernels.compiled.launch_classes import CAPABILITY
from tests.kernels.compiled.tables import recorded
from tests.kernels.support.ahead_of_time import MAX_SHARED_BYTES
from tests.kernels.support.passed import is_recorded, record
from tests.support.engine import families

RELEASES = tables.releases()
GPU = Path(__file__).parents[3] / "kernels" / "gpu"
SHORT = ("DeepSeek V3", "Llama 3.1 8B", "Llama 3.1 8B, split weights")
FP8_LATENTS = "DeepSeek V3, FP8 KV"
LATENTS = (
    *("DeepSeek V3", "Kimi K2", "DeepSeek V3, 16 heads", "DeepSeek V3, 8 heads"),
    FP8_LATENTS,
)
LATENT_BYTES = 200 << 10
DECODE = "attention.decode_attention._decode_attention_kernel"
PREFILL = "attention.prefill_attention._prefill_attention_kernel"
# Sums of rows of 512 or 256 values take half of a thread's registers. Other kernels: none.
MAX_LOCAL_LOADS = {DECODE: 34, PREFILL: 352}
RECORD = "record them: python -m tests.kernels.compiled.compile_table --write"


def cases(short: tuple[str, ...]) -> list[object]:
    return [
        pytest.param(case, mode, marks=() if case in short else pytest.mark.long)
        for case in CASES
        for mode in MODES
    ]


@pytest.fixture(params=RELEASES, ids=lambda path: path.stem)
def release(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_kernel_has_rows(release: Path) -> None:
    assert len(RELEASES) == 2
    assert set(recorded(release)) == set(launched_kernels())


def launched_kernels() -> Iterator[str]:
    """Compiled functions that no other compiled function calls."""
    functions, called = [], set()
    for path in sorted(GPU.rglob("*.py")):
        module = ".".join(path.relative_to(GPU).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and _is_compiled(node):
                functions.append((module, node.name))
                calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
                called |= {each.id for each in calls if isinstance(each, ast.Name)}
    for module, name in functions:
        if name not in called:
            yield f"{module}.{name}"


def _is_compiled(function: ast.FunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(each) for each in function.decorator_list)


def test_every_family_has_a_model() -> None:
    def configured_in(architecture: str) -> str:
        return FAMILIES[architecture].__module__

    sized = {configured_in(families.FAMILIES[name].architecture) for name, _ in SIZES.values()}
    # A family with images launches the kernels of its text model: torch computes the encoder.
    configured = {configured_in(architecture) for architecture in FAMILIES}
    assert sized == {each for each in configured if ".vision." not in each}


@pytest.mark.parametrize(("case", "mode"), cases((*SHORT, FP8_LATENTS)))
def test_every_launch_class_has_a_row(case: str, mode: Mode) -> None:
    table = recorded(FILE)
    found = classes_of(case, mode).values()
    assert [each.text for each in found if each.key not in table.get(each.name, {})] == [], RECORD


def test_every_class_fits_and_operands_are_copied_wide(release: Path) -> None:
    for kernel, rows in recorded(release).items():
        for key, row in rows.items():
            assert row.shared_bytes <= MAX_SHARED_BYTES[CAPABILITY], (kernel, key)
            assert row.local_loads <= MAX_LOCAL_LOADS.get(kernel, 0), (kernel, key)
            assert row.wide_copies or not row.has_products, (kernel, key)
            assert row.overwritten == 0, (kernel, key)


@pytest.mark.parametrize(
    ("case", "mode"),
    [each for each in cases((*SHORT, FP8_LATENTS)) if each.values[0] in LATENTS],
)
def test_attention_over_latents_fits(case: str, mode: Mode, release: Path) -> None:
    """Only prefill in the exact mode, which joins segments, spills."""
    table = recorded(release)
    for each in classes_of(case, mode).values():
        if each.name in (DECODE, PREFILL):
            row = table[each.name][each.key]
            assert row.shared_bytes <= LATENT_BYTES
            assert row.local_loads == 0 or (each.name, mode) == (PREFILL, "exact")


def test_readme_is_of_the_tables() -> None:
    assert tables.README.read_text() == tables.readme()


def test_sample_compiles_to_what_is_recorded(request: pytest.FixtureRequest) -> None:
    """One class of each kernel whose source is another one than the rows were recorded from: that
    of the fewest registers, which compiles soonest.
    """
    if FILE not in RELEASES:
        pytest.skip(f"no table of this release of Triton; {RECORD}")
    if is_recorded(request.node.nodeid):
        pytest.skip("compiled before, from the same sources")
    found = {key: each for case in SHORT for key, each in classes_of(case, "exact").items()}
    rows, sources = recorded(FILE), tables.recorded_sources(FILE)
    for name, classes in by_kernel(found.values()).items():
        if classes[0].source == sources.get(name):
            continue
        ((each, row),) = compiled([min(classes, key=lambda x: rows[name][x.key].registers)])
        assert row == rows[name][each.key], f"{each.text}: {RECORD}"
    record(request.node.nodeid)


@pytest.mark.long
@pytest.mark.parametrize("kernel", sorted(recorded(RELEASES[-1])))
def test_all_classes_compile_to_what_is_recorded(
    request: pytest.FixtureRequest, kernel: str
) -> None:
    assert FILE in RELEASES, f"no table of this release of Triton: {RECORD}"
    if is_recorded(request.node.nodeid):
        pytest.skip("compiled before, from the same sources")
    found = {each.key: row for each, row in compiled(by_kernel(all_classes().values())[kernel])}
    assert found == recorded(FILE)[kernel], RECORD
    record(request.node.nodeid)
