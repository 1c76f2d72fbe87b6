"""One copy of a model's weights in a host's memory, shared by all processes that serve it.

The weights are in a packed file (shared_file.py) in the form that the model computes with: fused,
in the compute dtype, linear weights packed by `kernels.cpu.gemm.linear`, or compressed. Processes
map it read-only and compute with views of the mapping, so that the page cache holds the only copy.
The file's header contains the revision: a second start neither converts nor hashes.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from pathlib import Path

import msgspec
import structlog
import torch
import xxhash
from torch import Tensor, nn

from kernels.device import IS_INTERPRETED
from kernels.ops import QuantizedWeight, cpu_host
from shared.engine.weights.load import matched_names
from shared.engine.weights.shared_file import (
    MAGIC,
    FileIdentity,
    PackedFile,
    PayloadWriter,
    build_packed,
    open_packed,
    packed_path,
)
from shared.engine.weights.weight_bytes import (
    CompressedForm,
    PackedForm,
    QuantizedForm,
    can_share_packed,
    compressed_form,
    compressed_view,
    packed_bytes,
    packed_view,
    quantized_form,
    quantized_view,
)
from shared.engine.weights.weight_regions import WeightRegion, filled_bytes, regions_of, view_of
from shared.engine.weights.weight_source import WeightSource
from shared.transport.wire_errors import one_line

log = structlog.get_logger(__name__)

CPU = torch.device("cpu")
COMPRESSED_VERSION = 1  # changes with the format of compressed weights


def weights_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    if environ.get("HEARTH_CACHE_DIR"):
        return Path(environ["HEARTH_CACHE_DIR"], "weights")
    root = environ.get("XDG_CACHE_HOME")
    base = Path(root) if root else Path(environ.get("HOME", tempfile.gettempdir()), ".cache")
    return base / "hearth" / "weights"


def map_weights(
    model: nn.Module,
    destinations: Mapping[str, Tensor],
    tensors: WeightSource,
    config: bytes,
    revision: Callable[[], str],
    cache_dir: Path,
    *,
    is_compressed: bool = False,
) -> str | None:
    """Makes the model's weights views of the packed file, and builds the file if necessary.

    With `is_compressed`, weights that become smaller are compressed in the file and in memory.

    `model` is on the CPU and still empty; `revision` is called when the file is built. Returns the
    revision, or None without any change if the cache cannot be used. Raises CheckpointError for a
    checkpoint that does not match the model.
    """
    regions = regions_of(model, destinations)
    try:
        packed = _packed_file(
            regions, tensors, config, revision, cache_dir, is_compressed=is_compressed
        )
    except OSError as error:
        log.warning("shared_weights_unavailable", cache=str(cache_dir), reason=one_line(error))
        return None
    for region in regions:
        _adopt(region, packed)
    return packed.header.revision


def compress_weights(
    model: nn.Module,
    destinations: Mapping[str, Tensor],
    tensors: WeightSource,
    device: torch.device = CPU,
    readers: Executor | None = None,
) -> None:
    """Fills a model with private weights on `device`, compressed where they become smaller. The
    model's own may be on the meta device.

    Storages are filled and compressed one at a time, so that besides the result only the largest
    one is in memory. Raises CheckpointError.
    """
    matched_names(tensors, destinations)
    regions = regions_of(model, destinations)
    del destinations  # destinations and regions hold references to the weights
    while regions:
        _compress(regions.pop(0), tensors, device, readers)


def _compress(
    region: WeightRegion, tensors: WeightSource, device: torch.device, readers: Executor | None
) -> None:
    filled = filled_bytes(region, tensors, device, readers)
    weight = region.compressed(filled)
    if weight is None:
        region.adopt(filled)
    else:
        region.adopt_compressed(weight)


def _packed_file(
    regions: list[WeightRegion],
    tensors: WeightSource,
    config: bytes,
    revision: Callable[[], str],
    cache_dir: Path,
    *,
    is_compressed: bool,
) -> PackedFile:
    sources = tuple(FileIdentity.of(path) for path in tensors.files())
    key = _key(regions, sources, config, is_compressed=is_compressed)
    path = packed_path(cache_dir, key)
    opened = open_packed(path, key)
    if opened is not None:
        return opened
    matched_names(tensors, {name: at for each in regions for name, at in each.destinations.items()})

    def write(writer: PayloadWriter) -> str:
        for region in regions:
            _write_region(writer, region, tensors, is_compressed=is_compressed)
        return revision()

    num_bytes = sum(region.num_bytes for region in regions)
    return build_packed(path, key, sources, write, num_expected_bytes=num_bytes)


def _key(
    regions: list[WeightRegion],
    sources: tuple[FileIdentity, ...],
    config: bytes,
    *,
    is_compressed: bool,
) -> str:
    """Returns the digest of everything that determines the file's content, including the
    machine.
    """
    layout = [
        [
            region.name,
            region.num_bytes,
            region.is_needed_dense,
            sorted(region.linears),
            {name: _place(tensor) for name, tensor in region.tensors.items()},
            {name: _place(tensor) for name, tensor in sorted(region.destinations.items())},
        ]
        for region in regions
    ]
    library, layouts = cpu_host().library_name(), cpu_host().weight_layouts()
    machine = [str(torch.__version__), library, *layouts, can_share_packed(), IS_INTERPRETED]
    described = msgspec.json.encode(
        [MAGIC.decode(), COMPRESSED_VERSION * is_compressed, machine, layout, sources]
    )
    return xxhash.xxh3_128(described + config).hexdigest()


def _place(tensor: Tensor) -> list[str | int | tuple[int, ...]]:
    offset = int(tensor.storage_offset())
    return [str(tensor.dtype), offset, tuple(tensor.shape), tensor.stride()]


def _write_region(
    writer: PayloadWriter, region: WeightRegion, tensors: WeightSource, *, is_compressed: bool
) -> None:
    filled = filled_bytes(region, tensors, CPU)
    compressed = region.compressed(filled) if is_compressed else None
    if cpu_host().is_compressed(compressed):
        writer.append(region.name, compressed.memory, compressed_form(compressed))
        return
    is_needed_dense = region.is_needed_dense
    for name, module in region.linears.items():
        dense = view_of(filled, module.parameter)
        is_quantized = module.store is not None
        weight = module.packed(dense) if is_quantized or can_share_packed() else dense
        if isinstance(weight, QuantizedWeight):
            writer.append(_packed_name(name), weight.memory, quantized_form(weight))
        elif isinstance(weight, Tensor) and cpu_host().is_packed(weight):
            form, data = packed_bytes(weight)
            writer.append(_packed_name(name), data, form)
        else:
            is_needed_dense = True
    if is_needed_dense:
        writer.append(region.name, filled)


def _packed_name(module_name: str) -> str:
    return f"{module_name} packed"


def _adopt(region: WeightRegion, packed: PackedFile) -> None:
    """Uses the file's weights; linear weights that are not packed there are packed by `pack`."""
    spans = packed.header.spans
    span = spans.get(region.name)
    if span is not None:
        stored = packed.bytes_of(region.name)
        if isinstance(span.form, CompressedForm):
            region.adopt_compressed(compressed_view(span.form, stored))
            return
        region.adopt(stored)
    for name, module in region.linears.items():
        span = spans.get(_packed_name(name))
        if span is None:
            continue
        stored = packed.bytes_of(_packed_name(name))
        if isinstance(span.form, PackedForm):
            module.replace_weight(packed_view(span.form, stored))
        elif isinstance(span.form, QuantizedForm):
            module.replace_weight(quantized_view(span.form, stored))
