"""Loads the image encoder of a checkpoint."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.device import IS_INTERPRETED
from shared.engine.executors.cuda.cuda_device import CudaDevice, cuda_device
from shared.engine.executors.load import resolve_device
from shared.engine.layers.linear import MatmulModule, weights_unset_on
from shared.engine.model_config.vision_config import (
    Llama4VisionConfig,
    MoonVitConfig,
    SiglipConfig,
    VisionConfig,
)
from shared.engine.models.vision.llama4_vision import Llama4Encoder
from shared.engine.models.vision.moonvit import MoonVit
from shared.engine.models.vision.siglip import SiglipEncoder
from shared.engine.weights.checkpoint_files import Reading
from shared.engine.weights.checkpoint_tensors import FormedTensors
from shared.engine.weights.dummy_weights import DummyTensors
from shared.engine.weights.load import load_weights, open_checkpoint
from shared.engine.weights.reading.digest_cache import digest_cache
from shared.engine.weights.reading.staging import LocalStaging
from shared.engine.weights.shared_weights import map_weights, weights_cache_dir
from shared.engine.weights.weight_source import WeightSource
from shared.tokenizer.checkpoint_file import exists, read_checkpoint_json

# Where transformers looks for an image processor, the first one before the second.
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_LEVELS = 256
TILE_PRIORITY = 0  # that of the steps
EncoderModel = SiglipEncoder | Llama4Encoder | MoonVit


class PixelFields(msgspec.Struct, frozen=True):
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class _PixelProcessor(PixelFields, frozen=True):
    media_proc_cfg: PixelFields | None = None  # Kimi's place for all fields
    image_processor: PixelFields | None = None  # that of transformers 5


class LoadedEncoder:
    """A `TileEncoder`: a model, and the values of its pixels."""

    def __init__(
        self,
        model: EncoderModel,
        pixels: PixelFields,
        device: torch.device,
        num_threads: int | None = None,
        *,
        cuda: CudaDevice | None = None,
    ) -> None:
        """`num_threads`: of the CPU, for each tile; None: torch's number at present. `cuda`: the
        device, to which the calling thread is bound; None: the CPU.
        """
        self.config = model.config
        self.vector_bytes = model.config.output_size * model.dtype.itemsize
        self._model = model
        self._device = device
        self._num_threads = num_threads or torch.get_num_threads()
        # Llama 4 computes the values of its pixels in BF16
        dtype = torch.bfloat16 if isinstance(model, Llama4Encoder) else torch.float32
        self._values = _values_of_levels(pixels, dtype).to(device)
        self._cuda, self._stream = cuda, None if cuda is None else _tile_stream(cuda)

    def init_thread(self) -> None:
        """Binds the calling thread to the device, and sets its number of threads: steps change that
        of their own.
        """
        torch.set_num_threads(self._num_threads)
        if self._cuda is not None:
            self._cuda.bind()

    @torch.inference_mode()
    def encode_tile(self, tile: NDArray[np.uint8]) -> bytes:
        with nullcontext() if self._cuda is None else self._cuda.driver.stream(self._stream):
            vectors = self._model(self.normalized(tile).unsqueeze(0))
            raw: bytes = vectors.cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return raw

    def check(self) -> None:
        """Raises RuntimeError if the device is lost. It waits for the tiles' stream alone: CUDA
        refuses to wait for a device while another thread captures a graph there.
        """
        if self._stream is not None:
            self._stream.synchronize()

    def normalized(self, tile: NDArray[np.uint8]) -> Tensor:
        """tile [3, H, W] -> its values in FP32."""
        levels = torch.from_numpy(tile.astype(np.int64)).to(self._device)
        return torch.stack([own[at] for own, at in zip(self._values, levels, strict=True)])


def load_encoder(
    model_dir: Path,
    config: VisionConfig,
    dtype: str,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    num_threads: int | None = None,
) -> LoadedEncoder:
    """Raises CheckpointError, or ConfigError for a device that cannot be used."""
    target = resolve_device(device)
    cuda = cuda_device(target) if target.type == "cuda" else None
    if cuda is not None:
        cuda.bind()
    with target, weights_unset_on(target):
        model = _model_of(config, getattr(torch, dtype)).eval()
    destinations = model.weight_destinations()
    described = msgspec.json.encode([config, dtype, "vision"])
    if load_format == "dummy":
        _fill(model, DummyTensors(model_dir, destinations), destinations, described, target)
    else:
        with open_checkpoint(model_dir, Reading(LocalStaging(), digest_cache())) as tensors:
            formed = FormedTensors(tensors, config.form)
            _fill(model, formed, destinations, described, target)
    for module in model.modules():
        if isinstance(module, MatmulModule):
            module.pack()
    return LoadedEncoder(model, _pixel_fields(model_dir), target, num_threads, cuda=cuda)


def _tile_stream(cuda: CudaDevice) -> Any:
    """Returns a stream beside that of the steps, so that these do not wait for a tile. Its work
    waits for what the calling thread has launched: that fills the weights.
    """
    stream, filled = cuda.driver.Stream(cuda.index, TILE_PRIORITY), cuda.driver.Event()
    filled.record()
    stream.wait_event(filled)
    return stream


def _model_of(config: VisionConfig, dtype: torch.dtype) -> EncoderModel:
    match config:
        case SiglipConfig():
            return SiglipEncoder(config, dtype=dtype)
        case Llama4VisionConfig():
            return Llama4Encoder(config, dtype=dtype)
        case MoonVitConfig():
            return MoonVit(config, dtype=dtype)


def _fill(
    model: EncoderModel,
    tensors: WeightSource,
    destinations: dict[str, Tensor],
    described: bytes,
    device: torch.device,
) -> None:
    """Processes of a host share one copy if possible."""
    if device.type == "cpu" and not IS_INTERPRETED:
        place = tensors, described, lambda: "vision", weights_cache_dir()
        if map_weights(model, destinations, *place) is not None:
            return
    load_weights(tensors, destinations)


def _pixel_fields(model_dir: Path) -> PixelFields:
    """Raises CheckpointError."""
    both, alone = (
        read_checkpoint_json(path, _PixelProcessor) if exists(path) else _PixelProcessor()
        for path in (model_dir / name for name in PROCESSORS)
    )
    return both.image_processor or alone.media_proc_cfg or alone


def _values_of_levels(pixels: PixelFields, dtype: torch.dtype) -> Tensor:
    """[3, 256] FP32: the value of each level of a channel, computed in `dtype`."""
    levels = torch.arange(_LEVELS, dtype=torch.float32).to(dtype) * pixels.rescale_factor
    given = (pixels.image_mean, pixels.image_std)
    mean, std = (torch.tensor(each, dtype=dtype)[:, None] for each in given)
    return ((levels - mean) / std).float()
