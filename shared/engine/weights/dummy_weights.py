"""Seeded weights that depend only on the config, for measurements without a checkpoint.

Each element is a hash of seed, tensor name and index, in integer arithmetic, so that every device
computes the same bits, in place, a few MiB at a time. The sum of a hash's four bytes is nearly
normal (Irwin-Hall), with a standard deviation of 1 / sqrt(inputs), so the scale of activations is
constant through a deep model (0.016 for 4,096 inputs). Norms are the identity, biases are zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.load import CODE_DTYPES
from shared.engine.weights.weight_source import Content, TensorInfo, check_part

VERSION = 1  # version of the formula: a change changes weights and revisions
CHUNK_ELEMENTS = 1 << 22
_SUM_MEAN = 4 * 127.5
_INT4_STD = math.sqrt((16**2 - 1) / 12)
_INT8_STD = 40.0
_ZEROS, _ORDERS = (".weight_zero_point", ".qzeros"), (".g_idx", ".weight_g_idx")
_CONSTANT = (".weight_scale", ".weight_scale_inv", ".scales", ".weight_scales", *_ZEROS, *_ORDERS)
_SUM_STD = math.sqrt(4 * (256**2 - 1) / 12)


class DummyTensors:
    """A `WeightSource` of exactly the model's tensors; reads no file but the config."""

    def __init__(
        self,
        model_dir: Path,
        destinations: Mapping[str, Tensor],
        *,
        norm_weight: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Generates random weights. `norm_weight` makes a norm's scale 1: it is 0 for norms that
        add 1 to their weight.
        """
        self._path = model_dir / "config.json"
        self._shapes = {name: tuple(tensor.shape) for name, tensor in destinations.items()}
        self._codes = {
            name: CODE_DTYPES[tensor.dtype]
            for name, tensor in destinations.items()
            if tensor.dtype in CODE_DTYPES
        }
        self._norm_weight = norm_weight
        self._seed = seed

    @property
    def identity(self) -> str:
        """Distinguishes these weights from others of the same config."""
        return f"dummy/v{VERSION}/seed{self._seed}"

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def files(self) -> list[Path]:
        return [self._path]

    def path(self, name: str) -> Path:
        return self._path

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._codes.get(name, "F32"), self._shapes[name])

    def content(self, name: str) -> Content:
        """Returns content derived from the name, without computing the tensor."""
        described = f"{self.identity}/{self._norm_weight}/{name}".encode()
        digest = xxhash.xxh3_128_hexdigest(described)
        return Content(*self.info(name), digest)

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """Computes the part on the device of `out`, rounded once to its dtype."""
        full = self._shapes[name]
        check_part(name, full, cut, out)
        if name.endswith((".bias", "_bias")):
            out.zero_()
        elif name.endswith("norm.weight"):
            out.fill_(self._norm_weight)
        elif name.endswith(_CONSTANT):
            out.fill_(self._constant(name))
        else:
            key = xxhash.xxh3_64_intdigest(f"{self.identity}/{name}".encode())
            width, std = math.prod(full[1:]), 1 / math.sqrt(full[-1])
            std = _CODE_STD.get(self._codes.get(name, ""), std)
            for (rows, *columns), part in cut.slices(full):
                if not columns and out[part].is_contiguous():
                    _fill_run(out[part].view(-1), key, rows.start * width, std)
                    continue
                column = columns[0].start if columns else 0
                for row, values in enumerate(out[part], start=rows.start):
                    _fill_run(values, key, row * width + column, std)

    def row_cuts(self, name: str) -> Sequence[Cut]:
        return (WHOLE,)

    def _constant(self, name: str) -> float:
        """Zero points are those of symmetric codes; scales give weights the standard deviation of
        dense ones, where packed codes are taken for four bits. All columns are of the first group.
        """
        layer, _, kind = name.rpartition(".")
        if name.endswith(_ORDERS):
            return 0
        if kind == "weight_scales":
            return 127 - round(math.log2(_E2M1_STD * math.sqrt(32 * self._shapes[name][-1])))
        if name.endswith(_ZEROS):
            return 0 if self._codes[name] == "I8" else _signed(0x88888888)
        weight = f"{layer}.weight"
        if weight in self._shapes:
            std = _CODE_STD[self._codes[weight]]
            return 1 / (std * math.sqrt(self._shapes[weight][-1]))
        if kind == "scales":
            words, num_rows = self._shapes[f"{layer}.qweight"]
            is_by_rows = num_rows == self._shapes[name][-1]
            return 1 / (_INT4_STD * math.sqrt(8 * words if is_by_rows else words))
        return 1 / (_INT4_STD * math.sqrt(8 * self._shapes[f"{layer}.weight_packed"][-1]))


_E2M1_STD = 2.94  # of all sixteen codes
_CODE_STD = {"F8_E4M3": 1.0, "I8": _INT8_STD}


def _fill_run(out: Tensor, key: int, index: int, std: float) -> None:
    """out [n]: consecutive elements."""
    for start in range(0, len(out), CHUNK_ELEMENTS):
        chunk = out[start : start + CHUNK_ELEMENTS]
        bits = _hashes(key + (index + start) * 0x9E3779B9, len(chunk), out.device)
        if out.dtype == torch.uint8:  # two codes
            chunk.copy_(bits & 255)
            continue
        if out.dtype == torch.int32:  # eight codes
            chunk.copy_(bits)
            continue
        total = (bits & 255).add_((bits >> 8) & 255).add_((bits >> 16) & 255)
        total.add_((bits >> 24) & 255)
        chunk.copy_(total.float().sub_(_SUM_MEAN).mul_(std / _SUM_STD))


def _hashes(first: int, count: int, device: torch.device) -> Tensor:
    """[count] wrapping int32: a Weyl sequence, hashed with Wellons's lowbias32."""
    bits = torch.arange(count, dtype=torch.int32, device=device)
    bits.mul_(_signed(0x9E3779B9)).add_(_signed(first))
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def _signed(word: int) -> int:
    """Returns the lowest 32 bits, in two's complement."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word
