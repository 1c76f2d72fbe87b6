"""Fills a model from safetensors files, or a bundle of them: one file, or shards named by an index.

Every mismatch between the model's tensors and the files' is a CheckpointError with one line that
names the tensor and the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import structlog
import torch
import xxhash
from torch import Tensor

from shared.engine.model_config.checkpoint_form import is_harmless, is_quantized_part
from shared.engine.parallel.cuts import WHOLE, Cut
from shared.engine.weights.checkpoint_files import Reading, TensorFile, checkpoint_folder
from shared.engine.weights.checkpoint_index import (
    INDEX_FILE,
    SINGLE_FILE,
    file_names,
    read_index,
)
from shared.engine.weights.weight_source import Content, TensorInfo, WeightSource
from shared.errors import CheckpointError

SOURCE_DTYPES = ("BF16", "F16", "F32")
CODE_DTYPES = {  # dtypes of quantized weights
    torch.int32: "I32",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
log = structlog.get_logger(__name__)


class CheckpointTensors:
    """The `WeightSource` of an open checkpoint: files that are mapped and read on demand."""

    def __init__(
        self,
        files: Mapping[Path, TensorFile],
        path_of: Mapping[str, Path],
        others: Iterable[Path] = (),
    ) -> None:
        """Reads tensors of several files. `others` are further files that determine the tensors."""
        self._files = files
        self._path_of = path_of
        self._others = tuple(others)

    def names(self) -> list[str]:
        return sorted(self._path_of)

    def files(self) -> list[Path]:
        """Returns all files that determine the tensors."""
        return sorted((*self._files, *self._others))

    def path(self, name: str) -> Path:
        return self._path_of[name]

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError."""
        return self._files[self._path_of[name]].info(name)

    def read_into(self, name: str, cut: Cut, out: Tensor) -> None:
        """Raises CheckpointError."""
        self._files[self._path_of[name]].read_into(name, cut, out)

    def row_cuts(self, name: str) -> Sequence[Cut]:
        """Raises CheckpointError."""
        return self._files[self._path_of[name]].row_cuts(name)

    def content(self, name: str) -> Content:
        """Raises CheckpointError."""
        return self._files[self._path_of[name]].content(name)

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file changed since it was opened."""
        for file in self._files.values():
            file.check_unchanged()


@contextmanager
def open_checkpoint(model_dir: Path, reading: Reading | None = None) -> Iterator[CheckpointTensors]:
    """Opens a checkpoint. Raises CheckpointError if a file is missing, truncated or
    contradicts the index.
    """
    with ExitStack() as stack:
        folder = checkpoint_folder(model_dir, stack, reading or Reading())
        files: dict[Path, TensorFile] = {}
        path_of: dict[str, Path] = {}
        index = read_index(model_dir)
        if index is None and (model_dir / INDEX_FILE).exists():
            log.warning("index_not_used", path=str(model_dir / INDEX_FILE), beside=SINGLE_FILE)
        for file_name in file_names(model_dir, index):
            path = folder.path(file_name)
            files[path] = folder.open(file_name, stack)
            for name in files[path].names():
                if name in path_of:
                    raise CheckpointError(f"{path}: tensor {name} is also in {path_of[name].name}")
                path_of[name] = path
        for name, file_name in (index or {}).items():
            if path_of.get(name) != folder.path(file_name):
                raise CheckpointError(
                    f"{folder.path(file_name)}: tensor {name} of {INDEX_FILE} is missing"
                )
        yield CheckpointTensors(files, path_of, folder.others())


def load_weights(
    tensors: WeightSource, destinations: Mapping[str, Tensor], readers: Executor | None = None
) -> None:
    """Copies every tensor into the view of the model's parameters with its name."""
    names = matched_names(tensors, destinations)
    fill(tensors, {name: destinations[name] for name in names}, readers)


def fill(
    tensors: WeightSource, destinations: Mapping[str, Tensor], readers: Executor | None = None
) -> None:
    """Reads each tensor into its destination; with several `readers` the largest ones first, and
    those in cuts.

    Raises CheckpointError, once no reader reads any more.
    """
    if readers is None:
        for name, destination in destinations.items():
            tensors.read_into(name, WHOLE, destination)
        return
    names = sorted(destinations, key=lambda name: -destinations[name].numel())
    cuts = [(name, cut) for name in names for cut in tensors.row_cuts(name)]
    reads = [
        readers.submit(tensors.read_into, name, cut, _part(destinations[name], cut))
        for name, cut in cuts
    ]
    wait(reads, return_when=FIRST_EXCEPTION)
    for read in reads:
        read.cancel()
    wait(reads)
    for read in reads:
        if not read.cancelled():
            read.result()


def _part(destination: Tensor, cut: Cut) -> Tensor:
    """cut: of `row_cuts`."""
    if cut.rows is None:
        return destination
    ((first, end),) = cut.rows
    return destination[first:end]


def matched_names(tensors: WeightSource, destinations: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors to copy; the others are named in one warning.
    Raises CheckpointError if one is missing, contradicts the config, or shows that a
    dense layer is quantized.

    No tensor is read, because an untrusted bundle may expand a few bytes to fill all memory.
    """
    names = tensors.names()
    missing = sorted(destinations.keys() - set(names))
    quantized = next((each for each in names if is_quantized_part(each, missing)), None)
    if quantized is not None:
        raise CheckpointError(
            f"{tensors.path(quantized)}: tensor {quantized} is quantized, which is served for the "
            "layers of a language model alone, with a quantization_config"
        )
    if missing:
        others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{_where(tensors, names)}: tensor {missing[0]} is missing{others}")
    for name in names:
        if name in destinations:
            _check_info(tensors, name, destinations[name])
        elif is_quantized_part(name, destinations):
            raise CheckpointError(f"{tensors.path(name)}: tensor {name} is not part of the model")
    report_unused(name for name in names if name not in destinations)
    return [name for name in names if name in destinations]


def report_unused(names: Iterable[str]) -> None:
    """Logs the names of tensors that the model does not use. Like transformers, it loads without
    them.
    """
    unused = sorted(name for name in names if not is_harmless(name))
    if unused:
        log.warning("tensors_not_used", count=len(unused), first=unused[:3])


def _check_info(tensors: WeightSource, name: str, destination: Tensor) -> None:
    dtype, shape = tensors.info(name)
    codes = CODE_DTYPES.get(destination.dtype)
    if codes is not None and dtype != codes:
        raise CheckpointError(f"{tensors.path(name)}: tensor {name} is {dtype}, not {codes}")
    if codes is None and dtype not in SOURCE_DTYPES:
        raise CheckpointError(
            f"{tensors.path(name)}: tensor {name} is {dtype}; only BF16, F16 and F32 are supported"
        )
    if shape != destination.shape:
        raise CheckpointError(
            f"{tensors.path(name)}: tensor {name} has shape {list(shape)}, "
            f"the config requires {list(destination.shape)}"
        )


def weights_digest(tensors: WeightSource, config: bytes, readers: Executor | None = None) -> str:
    """Returns the xxh3-128 in hex over the config and each tensor's name, dtype, shape and
    digest, by name.

    Independent of the distribution of tensors over files, and of bundling.
    """
    digest, names = xxhash.xxh3_128(config), tensors.names()
    contents = (
        map(tensors.content, names) if readers is None else readers.map(tensors.content, names)
    )
    for name, content in zip(names, contents, strict=True):
        digest.update(msgspec.json.encode([name, content]))
    return digest.hexdigest()


def _where(tensors: WeightSource, names: list[str]) -> Path:
    return tensors.path(names[0]).parent if names else Path(SINGLE_FILE)
