"""The bytes that a bundle saves, by kind of layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shared.engine.codec.manifest import Manifest, ManifestTensor
from shared.engine.codec.tensor import AS_IS


@dataclass(slots=True)
class KindRow:
    """Sums over the tensors of a kind and dtype."""

    kind: str
    dtype: str
    num_tensors: int = 0
    num_coded: int = 0
    num_weights: int = 0
    num_bytes: int = 0
    num_stored_bytes: int = 0
    entropy_bytes: int = 0
    num_raw_bytes: int = 0  # bytes of planes that are not coded

    def add(self, tensor: ManifestTensor) -> None:
        num_weights = math.prod(tensor.shape)
        is_coded = tensor.codec != AS_IS
        self.num_tensors += 1
        self.num_coded += is_coded
        self.num_weights += num_weights
        self.num_bytes += tensor.num_bytes
        self.num_stored_bytes += tensor.num_stored_bytes
        self.entropy_bytes += tensor.entropy_bytes
        num_raw_planes = 2 - len(tensor.coded_planes)
        self.num_raw_bytes += num_weights * num_raw_planes if is_coded else tensor.num_bytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_stored_bytes / max(1, self.num_weights)

    @property
    def entropy_bits_per_weight(self) -> float:
        """The size with an ideal code of each tensor's coded planes."""
        return 8 * self.entropy_bytes / max(1, self.num_weights)

    @property
    def saved_share(self) -> float:
        return 1 - self.num_stored_bytes / max(1, self.num_bytes)

    @property
    def excess_over_entropy(self) -> float:
        """Share by which the coded planes are larger than their entropy; 0.02 is 2 %."""
        coded = self.num_stored_bytes - self.num_raw_bytes
        return coded / max(1, self.entropy_bytes - self.num_raw_bytes) - 1 if coded else 0.0


def tensors_of(manifest: Manifest) -> list[ManifestTensor]:
    return [tensor for shard in manifest.shards for tensor in shard.tensors]


def rows_by_kind(tensors: Iterable[ManifestTensor]) -> list[KindRow]:
    """Returns one row per kind and dtype, in the order of first occurrence."""
    rows: dict[tuple[str, str], KindRow] = {}
    for tensor in tensors:
        key = kind_of(tensor.name), tensor.dtype
        rows.setdefault(key, KindRow(*key)).add(tensor)
    return list(rows.values())


def total_row(tensors: Iterable[ManifestTensor]) -> KindRow:
    row = KindRow("all", "")
    for tensor in tensors:
        row.add(tensor)
    return row


def kind_of(name: str) -> str:
    """Returns the kind of a tensor: `model.layers.7.mlp.experts.3.up_proj.weight` is a
    `mlp.experts.*.up_proj`.
    """
    name = name.removesuffix(".weight")
    _, _, below_layer = re.sub(r"\.\d+(?=\.)", ".*", name).partition(".*.")
    return below_layer or name
