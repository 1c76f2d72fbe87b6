"""Images in the engine, in the shape of SmolVLM 256M with seeded weights: the encoder beside that
of transformers, an image that is asked again, and text that runs while images are encoded.

    python -m benchmarks.models.images [--dtype auto] [--threads 2] [--rounds 5]

One tile of 512 x 512 pixels is 1,024 patches and 64 tokens. The encoders take turns; the figure of
each is the median of its rounds. `auto` is the type that a worker takes on this CPU. Text runs in
STREAMS streams, alone, then while 8 images of one tile are encoded, then beside 8 prompts of as
many tokens without an image, then alone in an engine without an encoder.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
import uvloop
from numpy.typing import NDArray
from transformers import SmolVLMConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMModel

from benchmarks.report import Row, at_least, at_most, write_result
from shared.block_hash import root_hash
from shared.clock import MonotonicClock
from shared.engine.batching.sequence import Sequence
from shared.engine.engine import Engine, StepProgress
from shared.engine.executors.load import load_executor
from shared.engine.executors.loading.model_loading import resolve_dtype
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.loop import EngineLoop
from shared.engine.models.checkpoint_config import read_config
from shared.engine.vision.image_encoder import ThreadedEncoder
from shared.engine.vision.image_jobs import ImageJobs, WantedImage
from shared.engine.vision.load_encoder import LoadedEncoder, load_encoder
from shared.engine.vision.sequence_images import SequenceImage, WantedImages
from shared.engine.vision.vector_cache import ImageKey, VectorCache
from shared.messages import ImagePart, SamplingParams
from shared.pixels.pixel_fetcher import PixelRequest

IMAGE_TOKEN = 49_190
CONFIG = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": IMAGE_TOKEN,
    "scale_factor": 4,
    "tie_word_embeddings": False,
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    },
    "text_config": {
        "model_type": "llama",
        "vocab_size": 49_280,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
    },
}
TILE = (3, 512, 512)
TOKENS_PER_TILE = 64
WORDS = [5] * 8  # before an image, and twice after it
STREAMS = 4
NUM_IMAGES = 8
ITL_TOKENS = 150  # of each stream
RUNNING_TOKENS = 10  # before images come
ENCODER_BAR, AGAIN_BAR, ITL_BAR, TEXT_BAR = 1.2, 0.2, 1.5, 0.99


def write_config(folder: Path) -> Path:
    (folder / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    return folder


def pictures(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """[count, 1, 3, 512, 512]."""
    shape = (count, 1, *TILE)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def compare_encoders(encoder: LoadedEncoder, options: argparse.Namespace) -> list[Row]:
    """Returns the median seconds of one tile, of both."""
    peer = SmolVLMModel(SmolVLMConfig(**_fields_of_peer())).to(getattr(torch, options.dtype)).eval()
    tile = pictures(1)[0, 0]

    @torch.inference_mode()
    def theirs() -> None:
        values = torch.from_numpy(tile).to(torch.float32) / 255 * 2 - 1
        hidden = peer.vision_model(values.unsqueeze(0).to(peer.dtype)).last_hidden_state
        peer.connector(hidden)

    torch.set_num_threads(options.threads)
    pairs = [
        (seconds(lambda: encoder.encode_tile(tile)), seconds(theirs))
        for _ in range(options.rounds + 1)
    ][1:]
    ours_s, theirs_s = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(their / our for our, their in pairs)
    row: Row = {
        "case": f"encoder, one tile, {options.dtype}",
        "hearth_ms": round(ours_s * 1e3, 1),
        "transformers_ms": round(theirs_s * 1e3, 1),
        "ratio": round(ratio, 2),
    }
    return [row]


def _fields_of_peer() -> dict[str, object]:
    return {key: value for key, value in CONFIG.items() if key not in ("architectures",)}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Streams:
    """An engine loop; measures the times of tokens."""

    def __init__(self, executor: LocalExecutor, encoder: LoadedEncoder | None) -> None:
        self.engine = Engine(
            num_blocks=executor.num_blocks,
            block_size=executor.kv_layout.block_size,
            max_context_tokens=4096,
            max_batch_tokens=512,
            max_sequences=64,
            reaches=executor.kv_layout.reaches,
        )
        self.clock = MonotonicClock()
        self.loop = EngineLoop(self.engine, executor, self.clock)
        self.loop.listen(self._on_progress)
        self.arrays: dict[bytes, NDArray[np.uint8]] = {}
        self.times: dict[bytes, list[float]] = {}
        self.running: dict[bytes, asyncio.Event] = {}  # RUNNING_TOKENS have come
        self.ended: dict[bytes, asyncio.Event] = {}
        self.jobs: ImageJobs | None = None
        if encoder is not None:
            self.vector_bytes = encoder.vector_bytes
            self.jobs = ImageJobs(
                ThreadedEncoder(encoder),
                self._fetch,
                VectorCache(256 << 20),
                self.clock.now,
                self.loop.wake,
            )

    async def _fetch(self, request: PixelRequest, deadline_s: float) -> memoryview:
        return self.arrays[request.image_hash].reshape(-1).data

    def text(self, name: str, num_tokens: int, max_tokens: int) -> asyncio.Event:
        token_ids = np.random.default_rng(len(name)).integers(3, 40_000, num_tokens).tolist()
        return self._add(self._sequence(name, token_ids, max_tokens))

    def image(self, name: str, array: NDArray[np.uint8]) -> asyncio.Event:
        """Asks about an image."""
        assert self.jobs is not None
        image_hash = name.partition("/")[0].encode().ljust(16)[:16]
        self.arrays[image_hash] = array
        token_ids = [*WORDS, *[IMAGE_TOKEN] * TOKENS_PER_TILE, *WORDS, *WORDS]
        sequence = self._sequence(name, token_ids, 1)
        part = ImagePart(
            first_token=8, num_tokens=TOKENS_PER_TILE, image_hash=image_hash, grid=(0, 0)
        )
        sequence.image_parts = (part,)
        request = PixelRequest(
            gateway_id="", tenant_id="t", request_id=name, image_hash=image_hash, shape=array.shape
        )
        wanted = WantedImage(
            ImageKey("t", sequence.cache_root, image_hash), request, is_retained=True
        )
        own = [SequenceImage(np.arange(8, 8 + TOKENS_PER_TILE), wanted)]
        sequence.images = WantedImages(own, self.jobs, self.vector_bytes)
        return self._add(sequence)

    def _sequence(self, name: str, token_ids: list[int], max_tokens: int) -> Sequence:
        return Sequence(
            sequence_id=name.encode(),
            tenant_id="t",
            cache_root=root_hash("t", "weights"),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=SamplingParams(
                seed=0, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ),
        )

    def _add(self, sequence: Sequence) -> asyncio.Event:
        self.times[sequence.sequence_id] = [self.clock.now()]
        self.running[sequence.sequence_id] = asyncio.Event()
        ended = self.ended[sequence.sequence_id] = asyncio.Event()
        self.engine.add(sequence)
        self.loop.wake()
        return ended

    def _on_progress(self, progress: list[StepProgress]) -> None:
        now = self.clock.now()
        for each in progress:
            name = each.sequence.sequence_id
            if each.token_ids:
                self.times[name].append(now)
            if len(self.times[name]) > RUNNING_TOKENS:
                self.running[name].set()
            if each.finish_reason is not None:
                assert each.error is None, each.error
                self.ended[name].set()

    def ttft(self, name: str) -> float:
        began_at, first, *_ = self.times[name.encode()]
        return first - began_at

    def gaps(self, names: list[str]) -> list[float]:
        """Returns the times between tokens, without the first."""
        return [gap for name in names for gap in np.diff(self.times[name.encode()][1:]).tolist()]

    async def close(self) -> None:
        await self.loop.stop()
        if self.jobs is not None:
            await self.jobs.close()


async def measure_again(streams: Streams) -> Row:
    await streams.image("warm", pictures(1, 1)[0]).wait()
    await streams.image("one", pictures(1, 2)[0]).wait()
    await streams.image("one/again", pictures(1, 2)[0]).wait()
    first, again = streams.ttft("one"), streams.ttft("one/again")
    assert streams.jobs is not None
    return {
        "case": "TTFT of an image, then again",
        "first_ms": round(first * 1e3, 1),
        "again_ms": round(again * 1e3, 1),
        "ratio": round(again / first, 3),
        "encoder_runs": streams.jobs.counts.num_encoded - 1,
    }


async def run_texts(
    streams: Streams, prefix: str, beside: Callable[[Streams], Awaitable[None]] | None = None
) -> list[float]:
    """Returns the gaps of all tokens; `beside` begins with the first ones."""
    names = [f"{prefix}{index}" for index in range(STREAMS)]
    ended = [streams.text(name, 40, ITL_TOKENS) for name in names]
    for name in names:
        await streams.running[name.encode()].wait()
    other = asyncio.create_task(beside(streams)) if beside is not None else None
    for each in ended:
        await each.wait()
    if other is not None:
        await other
    return streams.gaps(names)


async def add_images(streams: Streams) -> None:
    added = [
        streams.image(f"image {index}", array)
        for index, array in enumerate(pictures(NUM_IMAGES, 3))
    ]
    for each in added:
        await each.wait()


async def add_prompts(streams: Streams, every_s: float) -> None:
    """Adds as many prompts of as many tokens as `add_images`, at the pace of the encoder."""
    for index in range(NUM_IMAGES):
        await asyncio.sleep(every_s)
        await streams.text(f"prompt {index}", TOKENS_PER_TILE + 3 * len(WORDS), 1).wait()


def p99(values: list[float]) -> float:
    return float(np.quantile(values, 0.99))


async def measure_engine(
    folder: Path, encoder: LoadedEncoder, tile_s: float, options: argparse.Namespace
) -> list[Row]:
    """`tile_s`: the seconds of one tile."""
    load = {"dtype": options.dtype, "load_format": "dummy", "num_threads": options.threads}
    with_images = Streams(load_executor(folder, has_row_kernels=True, **load), encoder)
    with_images.loop.start()
    rows = [await measure_again(with_images)]
    await run_texts(with_images, "warm")
    alone = await run_texts(with_images, "alone")
    beside = await run_texts(with_images, "beside", add_images)
    beside_prompts = await run_texts(
        with_images, "texts", lambda streams: add_prompts(streams, tile_s)
    )
    loaded = [statistics.median(await run_texts(with_images, f"l{n}")) for n in range(3)]
    await with_images.close()
    without = Streams(load_executor(folder, has_row_kernels=True, **load), None)
    without.loop.start()
    await run_texts(without, "warm")
    plain = [statistics.median(await run_texts(without, f"p{n}")) for n in range(3)]
    await without.close()
    rows.append(
        {
            "case": f"ITL p99 of {STREAMS} streams beside {NUM_IMAGES} images",
            "alone_ms": round(p99(alone) * 1e3, 1),
            "beside_ms": round(p99(beside) * 1e3, 1),
            "beside_prompts_ms": round(p99(beside_prompts) * 1e3, 1),
            "ratio": round(p99(beside) / p99(alone), 2),
        }
    )
    speed = min(plain) / min(loaded)
    rows.append({"case": "text with an encoder loaded, without one", "ratio": round(speed, 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.dtype = resolve_dtype(options.dtype, torch.device("cpu"))
    with tempfile.TemporaryDirectory() as name:
        folder = write_config(Path(name))
        vision = read_config(folder).vision
        assert vision is not None
        encoder = load_encoder(
            folder, vision, options.dtype, load_format="dummy", num_threads=options.threads
        )
        rows = compare_encoders(encoder, options)
        rows += uvloop.run(measure_engine(folder, encoder, rows[0]["hearth_ms"] / 1e3, options))
    ratios = [row["ratio"] for row in rows]
    bars = [
        at_least("encoder, beside transformers", ratios[0], ENCODER_BAR, "x"),
        at_most("TTFT of an image again, of the first", ratios[1], AGAIN_BAR, "x"),
        at_most("ITL p99 beside images, of that alone", ratios[2], ITL_BAR, "x"),
        at_least("text with an encoder loaded, of that without", ratios[3], TEXT_BAR, "x"),
    ]
    write_result("images", rows, bars, ["-m", "benchmarks.models.images", *sys.argv[1:]])


if __name__ == "__main__":
    main()
