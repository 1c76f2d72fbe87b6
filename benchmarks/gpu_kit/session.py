"""The context of a part of the kit: its rows, its tensors, its clock and the ceilings.

device    tensors on CUDA, sizes of Llama 3.1 8B
dry       small tensors on the CPU, launches go to a fake driver, nothing is computed
compile   the device's sizes on the CPU, in memory that nothing touches: Triton's real compiler
          fills its cache, nothing is computed
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.gpu_kit.shapes import EIGHT_B, SMALL, Shapes
from benchmarks.gpu_kit.sources import sources_digest

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tests.support.kernels.cases.case import Inputs, Result

MAX_BYTES = 1 << 20  # limit of one part's rows: all parts stay below 16 MiB
HOLD_CYCLES = 2_000_000  # about a millisecond, in which the host fills the queue

Mode = Literal["device", "dry", "compile"]
Row = dict[str, Any]


class NotBuilt(Exception):
    """The feature that the part measures does not exist yet."""


class Unavailable(Exception):
    """This machine lacks what the part needs: a device, a tool, a package."""


@dataclass
class Session:
    """The context in which a part runs, and the rows that it writes.

    `card` and `driver` are those of the device, or empty if unknown.
    """

    part: str
    rows_file: Path
    mode: Mode = "device"
    ends: float = math.inf  # `time.monotonic()` at which the process is killed
    card: str = field(default_factory=lambda: os.environ.get("HEARTH_KIT_CARD", ""))
    driver: str = field(default_factory=lambda: os.environ.get("HEARTH_KIT_DRIVER", ""))
    num_bytes: int = field(default=0, init=False)
    failures: list[str] = field(default_factory=list, init=False)

    @property
    def is_dry(self) -> bool:
        return self.mode != "device"

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    @property
    def shapes(self) -> Shapes:
        return SMALL if self.mode == "dry" else EIGHT_B

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu" if self.is_dry else "cuda")

    @property
    def inputs(self) -> Inputs:
        """Returns inputs for the kernels' cases, in blocks of a worker's size."""
        from tests.support.kernels.cases.case import Inputs
        from tests.support.kernels.cases.sizes import REAL
        from tests.support.kernels.cases.sizes import SMALL as SMALL_SIZES

        sizes = REAL if self.shapes is EIGHT_B else SMALL_SIZES
        own = replace(sizes, block_size=self.shapes.block_size)
        return Inputs(own, self.device, is_computed=not self.is_dry)

    def add(self, columns: Row | None = None, /, *, kernels: Sequence[str] = (), **row: Any) -> Row:
        """Writes a row at once, so that it survives the death of the process. `kernels`: the
        operations whose sources the row depends on. `predicted_s` and `measured_s` give `error` and
        `of_roofline`; figures that a dry run lacks are left out. `columns`: others of any name.
        """
        row |= columns or {}
        if "predicted_s" in row:
            row |= self._beside_prediction(row.pop("predicted_s"), row.pop("measured_s"))
        if kernels:
            row["sources"] = sources_digest(tuple(kernels))
        row = {name: value for name, value in row.items() if value is not None}
        line = json.dumps({**self._heading(), **row}, default=str) + "\n"
        self.num_bytes += len(line)
        if self.num_bytes > MAX_BYTES:
            raise RuntimeError(f"the rows of part {self.part} exceed {MAX_BYTES} bytes")
        append_line(self.rows_file, line)
        print(line, end="", flush=True)
        return row

    def _heading(self) -> Row:
        dry = {"dry": self.mode} if self.is_dry else {}
        of_device = {"card": self.card, "driver": self.driver} if self.card else {}
        return {"part": self.part, **dry, **of_device}

    def need_device(self) -> None:
        """Raises Unavailable."""
        if self.is_dry:
            raise Unavailable("a dry run has no device")
        import torch

        if not torch.cuda.is_available():
            raise Unavailable("torch finds no CUDA device")

    def synchronize(self) -> None:
        if not self.is_dry:
            import torch

            torch.cuda.synchronize()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Returns a tensor: uninitialised on a device. Elsewhere zeros in memory that the system
        has not given yet: what indexes a tensor finds valid indices.
        """
        import torch

        make = torch.zeros if self.is_dry else torch.empty
        return make(shape, dtype=dtype or torch.bfloat16, device=self.device)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        import torch

        return torch.zeros(shape, dtype=dtype or torch.bfloat16, device=self.device)

    def random(
        self,
        *shape: int,
        dtype: torch.dtype | None = None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> Tensor:
        """Returns normal random numbers of a generator of the device; zeros where
        nothing is computed.
        """
        import torch

        if self.is_dry:
            return self.empty(*shape, dtype=dtype)
        generator = torch.Generator(self.device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=self.device)
        return values.mul_(scale).to(dtype or torch.bfloat16)

    def seconds(self, call: Callable[[], object], repetitions: int = 20) -> float | None:
        """Returns the device's seconds for a call, by events around `repetitions` of it. A
        kernel that waits lets the host fill the queue first. In a dry run `call` runs once,
        without a figure.
        """
        call()
        if self.is_dry:
            return None
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        for _ in range(repetitions):
            call()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repetitions

    def check(self, case: str, result: Result, *, kernels: Sequence[str] = ()) -> bool:
        """Adds a row with the largest error in units of the largest element; for a result that is
        not what it must be the part fails at its end. A dry run computes nothing to compare.
        """
        if self.is_dry:
            return True
        wanted, is_ok = result.wanted(), True
        try:
            result.check(result.found, wanted)
        except AssertionError:
            is_ok = False
            self.failures.append(case)
        error = _largest_error(result.found.float(), wanted.float())
        self.add(case=case, ok=is_ok, max_error=error, kernels=kernels)
        return is_ok

    def digest(self, case: str, tensor: Tensor, *, kernels: Sequence[str] = ()) -> str | None:
        """Adds a row of the digest of a seeded output's bits. None in a dry run."""
        if self.is_dry:
            return None
        import hashlib

        import torch

        content = tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
        found = hashlib.sha256(content.tobytes()).hexdigest()[:32]
        shape = [*tensor.shape, str(tensor.dtype).removeprefix("torch.")]
        self.add(case=case, digest=found, shape=shape, kernels=kernels)
        return found

    def rows_of(self, part: str) -> list[Row]:
        """Returns the rows of a part that ran before, of this mode."""
        if not self.rows_file.exists():
            return []
        rows = read_rows(self.rows_file)
        dry = self.mode if self.is_dry else None
        return [row for row in rows if row["part"] == part and row.get("dry") == dry]

    def ceiling(self, name: str) -> float:
        """Returns `copy_bytes_s` or `matmul_flops`, as measured here or assumed for the card; NaN
        if it is unknown.
        """
        return self._ceiling(name)[0]

    def _ceiling(self, name: str) -> tuple[float, str]:
        for row in self.rows_of("facts"):
            if row.get("case") == name and "value" in row:
                return float(row["value"]), "measured"
        from benchmarks.gpu_kit.ceilings import assumed

        value = assumed(self.card, name)
        return (math.nan, "unknown") if value is None else (value, "assumed")

    def _beside_prediction(self, predicted_s: float, measured_s: float | None) -> Row:
        """Returns the columns of a measured time beside its prediction. Nothing measured: no
        columns.

        `error` is (measured - predicted) / predicted.
        """
        if measured_s is None or math.isnan(predicted_s):
            return {} if measured_s is None else {"measured_ms": round(measured_s * 1e3, 4)}
        return {
            "predicted_ms": round(predicted_s * 1e3, 4),
            "measured_ms": round(measured_s * 1e3, 4),
            "error": round(measured_s / predicted_s - 1, 3),
            "of_roofline": round(predicted_s / measured_s, 3),
            "ceiling": self._ceiling("copy_bytes_s")[1],
        }


def _largest_error(found: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference, relative to the largest wanted value.

    Places with NaN in both tensors are omitted; NaN in only one of them makes the result NaN.
    """
    is_number = ~(found.isnan() & wanted.isnan())
    difference = (found - wanted)[is_number].abs()
    return float(difference.max() / wanted[is_number].abs().max().clamp_min(1e-30))


def append_line(path: Path, line: str) -> None:
    """Appends a line in one write, so that the lines of several processes do not mix.

    If the file ends in a line that was cut off, the new line still begins a line of its own.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        end = os.fstat(descriptor).st_size
        is_cut = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        os.write(descriptor, b"\n" * is_cut + line.encode())
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> list[Row]:
    """Returns the rows of all complete lines. A process that was killed may have cut off its last
    one.
    """
    rows = []
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows
