"""The context of a part of the kit: the file for its rows, and the ceilings measured before it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_BYTES = 1 << 20  # of one part's rows, so that all together stay below 16 MiB
# Of an H200, used if this machine's are not measured: bytes read and written, BF16 products.
COPY_BYTES_S, MATMUL_FLOPS = 4.3e12, 790e12

Row = dict[str, Any]


class NotBuilt(Exception):
    """The feature that the part measures does not exist yet."""


class Unavailable(Exception):
    """This machine lacks what the part needs: a device, a tool, a package."""


@dataclass
class Session:
    """`is_dry`: launches go to a fake driver, tensors are on the CPU, and nothing is computed."""

    part: str
    rows_file: Path
    is_dry: bool = False
    ends: float = math.inf  # `time.monotonic()` at which the process is killed
    num_bytes: int = field(default=0, init=False)

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def add(self, **row: Any) -> Row:
        """Writes a row immediately, so that it survives the death of the process."""
        line = json.dumps({"part": self.part, **row}, default=str) + "\n"
        self.num_bytes += len(line)
        if self.num_bytes > MAX_BYTES:
            raise RuntimeError(f"the rows of part {self.part} exceed {MAX_BYTES} bytes")
        with self.rows_file.open("a") as file:
            file.write(line)
        print(line, end="", flush=True)
        return row

    def need_device(self) -> None:
        """Raises Unavailable."""
        if self.is_dry:
            raise Unavailable("a dry run has no device")
        import torch

        if not torch.cuda.is_available():
            raise Unavailable("torch finds no CUDA device")

    @contextmanager
    def launching(self) -> Iterator[Any]:
        """Yields the device of tensors; launches go to it, or in a dry run to a fake driver."""
        import torch

        if not self.is_dry:
            self.need_device()
            yield torch.device("cuda")
            return
        from tests.kernels.support.fake_driver import fake_driver

        with fake_driver():
            yield torch.device("cpu")

    def rows_of(self, part: str) -> list[Row]:
        """The rows of a part that ran before."""
        if not self.rows_file.exists():
            return []
        rows = map(json.loads, self.rows_file.read_text().splitlines())
        return [row for row in rows if row["part"] == part]

    def ceiling(self, name: str) -> float:
        """`copy_bytes_s` or `matmul_flops`, of this machine or else of an H200."""
        for row in self.rows_of("device"):
            if row.get("case") == name:
                return float(row["value"])
        return {"copy_bytes_s": COPY_BYTES_S, "matmul_flops": MATMUL_FLOPS}[name]
