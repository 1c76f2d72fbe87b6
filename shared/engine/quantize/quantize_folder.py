"""Writes a quantized copy of a checkpoint folder, one tensor at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from shared.engine.codec.compress import ByteProgress
from shared.engine.codec.model_folder import ModelFolder, copy_file, list_model_folder
from shared.engine.codec.work_folder import WorkFolder, work_folder
from shared.engine.model_config.formats import (
    FP8_BLOCK,
    Fp8Block,
    Int4,
    TensorSpec,
    stored_tensors,
)
from shared.engine.model_config.quantization import find_match
from shared.engine.model_config.quantization_config import FIELD, scale_dtype
from shared.engine.quantize.round_to_nearest import quantized_tensors, read_numbers
from shared.engine.quantize.stacked_mxfp4 import CONFIG as MXFP4_CONFIG
from shared.engine.quantize.stacked_mxfp4 import StackedMxfp4
from shared.engine.weights.load import (
    INDEX_FILE,
    SOURCE_DTYPES,
    CheckpointTensors,
    open_checkpoint,
)
from shared.engine.weights.weight_source import DTYPES, read_tensor
from shared.errors import CheckpointError, ConfigError
from shared.tokenizer.checkpoint_file import read_checkpoint_json

CONFIG = "config.json"
# Linear layers of a decoder layer: attention, MLP and experts; none of an image encoder.
_LINEAR = re.compile(
    r"((model|language_model|text_model)\.)*layers\.\d+\..*(_proj|_proj_with_mqa|\.w[123])$"
)
# Dense layers, besides those that the user names: the head, and linear layers that choose experts.
DENSE = ("lm_head", r"re:.*mlp\.gate$", r"re:.*block_sparse_moe\.gate$")


@dataclass(frozen=True)
class _Written:
    """The tensors of a checkpoint as they are written."""

    tensors: CheckpointTensors
    layers: frozenset[str]  # names of the quantized layers
    form: Int4 | Fp8Block

    def described(self, name: str) -> dict[str, TensorSpec]:
        """Returns what the tensor `name` becomes, in the order of `content`. Raises
        CheckpointError.
        """
        dtype, shape = self.tensors.info(name)
        layer = name.removesuffix(".weight")
        if not self._is_quantized(name):
            return {name: TensorSpec(dtype, shape)}
        try:
            found = stored_tensors(self.form, *shape)
        except CheckpointError as error:
            raise CheckpointError(f"{self.tensors.path(name)}: {layer}: {error.message}") from None
        if isinstance(self.form, Int4):
            found["weight_shape"] = TensorSpec("I64", (2,))
        return {f"{layer}.{kind}": each for kind, each in found.items()}

    def content(self, name: str) -> list[Tensor]:
        if not self._is_quantized(name):
            return [read_tensor(self.tensors, name)]
        layer = name.removesuffix(".weight")
        found = quantized_tensors(read_numbers(self.tensors, name), self.form)
        return [found[each.removeprefix(f"{layer}.")] for each in self.described(name)]

    def _is_quantized(self, name: str) -> bool:
        layer = name.removesuffix(".weight")
        return layer != name and layer in self.layers


def quantize_folder(
    source: Path,
    target: Path,
    kind: Literal["int4", "fp8", "mxfp4"],
    progress: ByteProgress,
    *,
    group: int = 32,
    is_symmetric: bool = True,
    ignored: Sequence[str] = (),
) -> int:
    """Writes `target`: linear layers of decoder layers in this format, all else unchanged; mxfp4 is
    of experts in one tensor alone.

    `group` (columns; 0: all) and `is_symmetric` are of int4; its scales have the model's dtype, as
    compressed-tensors' have. `ignored`: names of layers that stay dense, or `re:` and a pattern.
    Returns the number of quantized layers. Raises ConfigError and CheckpointError with one line;
    `target` then does not exist.
    """
    folder = list_model_folder(source)
    config = _config(source / CONFIG)
    form: Int4 | Fp8Block = Fp8Block()
    if kind == "int4":
        dtype = scale_dtype(config)
        form = Int4(group=group, is_symmetric=is_symmetric, scale_dtype=dtype)
    progress.expect(folder.num_bytes())
    with work_folder(target, source, resumes=False) as work, open_checkpoint(source) as tensors:
        _check_dtypes(tensors)
        if kind == "mxfp4":
            experts = StackedMxfp4(tensors)
            _check_dense(tensors, experts.layers)
            _write_shards(folder, experts, work, progress)
            _publish(work, tensors, {**config, FIELD: MXFP4_CONFIG})
            return len(experts.layers)
        _check_experts(tensors)
        matrices = sorted(_matrices(tensors))
        patterns = (*DENSE, *ignored)
        layers = [
            each for each in matrices if _LINEAR.match(each) and find_match(each, patterns) is None
        ]
        if not layers:
            raise ConfigError(f"{source}: no linear layer is left to quantize")
        _check_dense(tensors, (f"{each}.weight" for each in layers))
        _write_shards(folder, _Written(tensors, frozenset(layers), form), work, progress)
        dense = sorted({*matrices} - {*layers})
        described = _quantization_config(form, patterns, dense)
        _publish(work, tensors, {**config, FIELD: described})
    return len(layers)


def _publish(work: WorkFolder, tensors: CheckpointTensors, config: dict[str, Any]) -> None:
    """Raises CheckpointError if a file of weights changed while it was read."""
    tensors.check_unchanged()
    _write_json(work, CONFIG, config)
    work.publish()


def _config(path: Path) -> dict[str, Any]:
    found = read_checkpoint_json(path, dict[str, Any])
    text = found.get("text_config")
    if found.get(FIELD) or (isinstance(text, dict) and text.get(FIELD)):
        raise ConfigError(f"{path}: the checkpoint is quantized already ({FIELD})")
    return found


def _check_experts(tensors: CheckpointTensors) -> None:
    """Raises CheckpointError if one tensor has the weights of all experts of a layer."""
    for name in tensors.names():
        if ".experts." in name and len(tensors.info(name).shape) == 3:
            raise CheckpointError(
                f"{tensors.path(name)}: {name} has the weights of all experts, which are quantized "
                "only from one tensor each, but for mxfp4; or serve it as it is, or compress it"
            )


def _check_dtypes(tensors: CheckpointTensors) -> None:
    """Raises CheckpointError for a tensor that cannot be read."""
    for name in tensors.names():
        dtype = tensors.info(name).dtype
        if dtype not in DTYPES:
            raise CheckpointError(
                f"{tensors.path(name)}: tensor {name}: dtype {dtype!r} is not supported"
            )


def _check_dense(tensors: CheckpointTensors, names: Iterable[str]) -> None:
    """Raises CheckpointError for a tensor whose numbers are codes."""
    for name in names:
        dtype = tensors.info(name).dtype
        if dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"{tensors.path(name)}: tensor {name} is {dtype}; only BF16, F16 and F32 are "
                "quantized: take the dense checkpoint that this one was made of"
            )


def _matrices(tensors: CheckpointTensors) -> Iterator[str]:
    for name in tensors.names():
        layer, _, kind = name.rpartition(".")
        if kind == "weight" and len(tensors.info(name).shape) == 2:
            yield layer


def _write_shards(
    folder: ModelFolder, written: _Written | StackedMxfp4, work: WorkFolder, progress: ByteProgress
) -> None:
    weight_map: dict[str, str] = {}
    read = {path.relative_to(folder.root).as_posix() for path in written.tensors.files()}
    for shard in sorted(read):
        names = [
            name
            for name in written.tensors.names()
            if written.tensors.path(name) == folder.root / shard
        ]
        described = {key: each for name in names for key, each in written.described(name).items()}
        weight_map |= dict.fromkeys(described, shard)
        with work.written(shard) as file:
            _write_header(file, described)
            for name in names:
                for tensor in written.content(name):
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                dtype, shape = written.tensors.info(name)
                progress.advance(shard, prod(shape) * DTYPES[dtype].itemsize)
    # other safetensors files, too: of modules after the model, or the same weights by other names
    for name in sorted({*folder.files, *folder.shards} - {CONFIG, INDEX_FILE, *read}):
        with work.written(name) as file:
            copy_file(folder.root / name, file, partial(progress.advance, name))
    if INDEX_FILE in folder.files:
        _write_json(work, INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def _write_header(file: IO[bytes], tensors: dict[str, TensorSpec]) -> None:
    """Format: https://github.com/huggingface/safetensors#format."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _quantization_config(
    form: Int4 | Fp8Block, patterns: Sequence[str], dense: Sequence[str]
) -> dict[str, Any]:
    """Returns the config of the new checkpoint. `dense` has the matrices that stay as they are, by
    name: fp8 lists no patterns.
    """
    if isinstance(form, Fp8Block):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": list({"lm_head": None} | dict.fromkeys(dense)),
        }
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": form.is_symmetric,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [*patterns, *(each for each in dense if find_match(each, patterns) is None)],
        "kv_cache_scheme": None,
    }


def _write_json(work: WorkFolder, name: str, content: dict[str, Any]) -> None:
    with work.written(name) as file:
        file.write(json.dumps(content, indent=2).encode())
