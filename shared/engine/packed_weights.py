"""One copy of a model's weights in a host's memory, however many processes serve it.

The weights lie in a packed file (packed_file.py) as the model computes with them: fused, in the
compute dtype, the linear ones as `kernels.cpu.linear` packs them. Processes map it read-only and
the model's parameters are views of the mapping, so that the kernel's page cache holds the one copy.
The file's header keeps the revision: a second start neither converts nor hashes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgspec
import structlog
import torch
import xxhash
from torch import Tensor, nn

from kernels.cpu.amx import has_amx
from kernels.cpu.linear import is_packed
from kernels.device import IS_INTERPRETED
from kernels.ops import pack_weight
from shared.engine.layers.embedding import OutputHead
from shared.engine.layers.linear import Linear
from shared.engine.packed_file import (
    MAGIC,
    PackedFile,
    PayloadWriter,
    Source,
    build_packed,
    open_packed,
    packed_path,
)
from shared.engine.packed_memory import can_share_packed, packed_bytes, packed_view
from shared.engine.weights import CheckpointTensors, copy_tensor, matched_names

log = structlog.get_logger(__name__)


@dataclass
class Region:
    """One storage of the model, by the name of its first tensor.

    `linears` are modules that multiply with a tensor of it; where others read it, too, as the
    embedding of a tied model does, it is kept both packed and as it is.
    """

    name: str
    num_bytes: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    linears: dict[str, Linear | OutputHead] = field(default_factory=dict)
    destinations: dict[str, Tensor] = field(default_factory=dict)
    has_other_readers: bool = False

    @property
    def is_covered(self) -> bool:
        """Whether the checkpoint sets all of it."""
        sizes = (each.numel() * each.element_size() for each in self.destinations.values())
        return sum(sizes) >= self.num_bytes


def weights_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    if environ.get("HEARTH_CACHE_DIR"):
        return Path(environ["HEARTH_CACHE_DIR"], "weights")
    root = environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path(environ.get("HOME", tempfile.gettempdir()), ".cache")
    return base / "hearth" / "weights"


def map_weights(
    model: nn.Module,
    destinations: Mapping[str, Tensor],
    tensors: CheckpointTensors,
    config: bytes,
    revision: Callable[[], str],
    cache_dir: Path,
) -> str | None:
    """Makes the model's weights views of the packed file, which is built if need be.

    `model` is on the CPU and still empty; `revision` is asked when a file is built. Returns the
    revision, or None where the cache cannot be used: then nothing has changed. Raises
    CheckpointError for a checkpoint that does not fit.
    """
    regions = _regions(model, destinations)
    try:
        packed = _packed_file(regions, tensors, config, revision, cache_dir)
    except OSError as error:
        reason = " ".join(str(error).split())
        log.warning("weights_not_shared", cache=str(cache_dir), reason=reason)
        return None
    for region in regions:
        _adopt(region, packed)
    return packed.header.revision


def _packed_file(
    regions: list[Region],
    tensors: CheckpointTensors,
    config: bytes,
    revision: Callable[[], str],
    cache_dir: Path,
) -> PackedFile:
    sources = tuple(Source.of(path) for path in tensors.files())
    key = _key(regions, sources, config)
    path = packed_path(cache_dir, key)
    opened = open_packed(path, key)
    if opened is not None:
        return opened
    matched_names(tensors, {name: at for each in regions for name, at in each.destinations.items()})

    def write(writer: PayloadWriter) -> str:
        for region in regions:
            _write_region(writer, region, tensors)
        return revision()

    num_bytes = sum(region.num_bytes for region in regions)
    return build_packed(path, key, sources, write, num_expected_bytes=num_bytes)


def _regions(model: nn.Module, destinations: Mapping[str, Tensor]) -> list[Region]:
    """The storages that the checkpoint fills, in the order of its names."""
    found: dict[int, Region] = {}
    wanted = {_storage(each) for each in destinations.values()}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if _storage(tensor) in wanted:
            region = Region(name, tensor.untyped_storage().nbytes())
            found.setdefault(_storage(tensor), region).tensors[name] = tensor
    for name, tensor in destinations.items():
        found[_storage(tensor)].destinations[name] = tensor
    for name, module, tensor in _readers(model):
        reading = found.get(_storage(tensor))
        if reading is None:
            continue
        if isinstance(module, Linear | OutputHead) and tensor is module.weight:
            reading.linears[name] = module
        else:
            reading.has_other_readers = True
    return sorted(found.values(), key=lambda region: min(region.destinations))


def _readers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Every module with each of its own tensors; a shared tensor comes once for each."""
    for name, module in model.named_modules():
        for tensor in chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            yield name, module, tensor


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _key(regions: list[Region], sources: tuple[Source, ...], config: bytes) -> str:
    """Digests what the file's content follows from; the packed layouts from the machine."""
    layout = [
        [
            region.name,
            region.num_bytes,
            region.has_other_readers,
            sorted(region.linears),
            {name: _place(tensor) for name, tensor in region.tensors.items()},
            {name: _place(tensor) for name, tensor in sorted(region.destinations.items())},
        ]
        for region in regions
    ]
    capability = torch.backends.cpu.get_cpu_capability()
    machine = [str(torch.__version__), capability, has_amx(), can_share_packed(), IS_INTERPRETED]
    described = msgspec.json.encode([MAGIC.decode(), machine, layout, sources])
    return xxhash.xxh3_128(described + config).hexdigest()


def _place(tensor: Tensor) -> list[str | int | tuple[int, ...]]:
    offset = int(tensor.storage_offset())
    return [str(tensor.dtype), offset, tuple(tensor.shape), tensor.stride()]


def _write_region(writer: PayloadWriter, region: Region, tensors: CheckpointTensors) -> None:
    filled = _filled(region, tensors)
    is_needed_plain = region.has_other_readers
    for name, module in region.linears.items():
        weight = pack_weight(_view(filled, module.weight)) if can_share_packed() else filled
        if is_packed(weight):
            form, data = packed_bytes(weight)
            writer.append(_packed_name(name), data, form)
        else:
            is_needed_plain = True
    if is_needed_plain:
        writer.append(region.name, filled)


def _packed_name(module_name: str) -> str:
    return f"{module_name} packed"


def _filled(region: Region, tensors: CheckpointTensors) -> Tensor:
    """The bytes of one storage, [num_bytes] uint8."""
    filled = torch.empty(region.num_bytes, dtype=torch.uint8)
    if not region.is_covered:
        first = next(iter(region.tensors.values()))
        filled.copy_(torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage()))
    for name, destination in region.destinations.items():
        copy_tensor(tensors, name, _view(filled, destination))
    return filled


def _adopt(region: Region, packed: PackedFile) -> None:
    """A linear weight that is not in the file packed is left to `pack`."""
    spans = packed.header.spans
    if region.name in spans:
        stored = packed.bytes_of(region.name)
        for tensor in region.tensors.values():
            tensor.data = _view(stored, tensor)
    for name, module in region.linears.items():
        span = spans.get(_packed_name(name))
        if span is not None and span.form is not None:
            del module.weight
            module.weight = packed_view(span.form, packed.bytes_of(_packed_name(name)))


def _view(stored: Tensor, like: Tensor) -> Tensor:
    """`like`'s window on its storage, on the same bytes elsewhere."""
    typed = stored.view(like.dtype)
    offset = typed.storage_offset() + like.storage_offset()
    return typed.as_strided(like.shape, like.stride(), offset)
