"""If the bits of any result change, `KERNELS_VERSION` must be raised.

Then `python -m tests.support.engine.golden --write` records the new digests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.device import IS_INTERPRETED
from shared.engine.executors.loading import device_numerics as numerics
from shared.numerics import KERNELS_VERSION, TRITON_KERNELS_VERSION
from tests.support.engine import golden

RECORD = "record the digests: python -m tests.support.engine.golden --write"


def check(found: golden.Digests) -> None:
    """Skips if some cases have no recorded digest on their kind of device."""
    recorded = golden.recorded()
    assert recorded.kernels == KERNELS_VERSION, RECORD
    missing = set()
    for kind, digests in found.items():
        for name, digest in digests.items():
            wanted = recorded.digests.get(kind, {}).get(name)
            if wanted is None:
                missing.add(kind)
            else:
                changed = f"the bits of {name} on {kind} changed: raise KERNELS_VERSION and"
                assert digest == wanted, f"{changed} {RECORD}"
    if missing:
        pytest.skip(f"not all digests of {', '.join(sorted(missing))} are recorded; {RECORD}")


LONG = [case for case in golden.CASES if "float16" in case]  # no model has this dtype: 13 s


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.long if each in LONG else ()) for each in golden.CASES],
    ids=", ".join,
)
def test_bits_are_those_of_the_recorded_version(case: tuple[str, str, str], tmp_path: Path) -> None:
    kind, digest = golden.digest_of(case, tmp_path / "model")
    check({kind: {", ".join(case): digest}})


@pytest.mark.long
@pytest.mark.parametrize("environ", golden.LIMITED, ids=lambda environ: "-".join(environ.values()))
def test_bits_of_each_level_of_the_library_are_recorded(environ: dict[str, str]) -> None:
    check(golden.found_in_child(**environ))


@pytest.mark.long
def test_library_with_fewer_instructions_has_a_name_of_its_own() -> None:
    """Without compiled loops, so that it multiplies all."""
    check(golden.found_in_child(**golden.GENERIC, ONEDNN_MAX_CPU_ISA="AVX512_CORE"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_kind_of_kernels_has_its_version(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits that change on GPUs alone leave workers on CPUs their numerics."""
    monkeypatch.setattr(numerics, "compute_capability", lambda device: 90)
    has_triton = IS_INTERPRETED or device == "cuda"
    version = TRITON_KERNELS_VERSION if has_triton else KERNELS_VERSION
    found = numerics.device_numerics(torch.device(device), "float32", "exact", kv_dtype="float32")
    assert found.kernels.split("-")[0] == str(version)
    assert TRITON_KERNELS_VERSION != KERNELS_VERSION
