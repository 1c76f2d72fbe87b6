"""Prompts with images of Llama 4 and Kimi K2.5: transformers' log-probabilities, and the same bits
whatever is cut, cached or computed elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shared.engine.batching.sequence import SequenceState
from shared.engine.models.checkpoint_config import read_config
from shared.engine.vision.load_encoder import LoadedEncoder, load_encoder
from shared.errors import InvalidRequest
from shared.messages import ImagePart, ImageParts, SamplingParams
from tests.support.engine.model_worker import push_kv
from tests.support.engine.vision.seeing_models import (
    image,
    kimi_logprobs,
    llama4_logprobs,
    write_kimi,
    write_llama4,
)
from tests.support.engine.vision.vision_models import (
    IMAGE_TOKEN,
    TOKENS_PER_TILE,
    Picture,
    picture,
)
from tests.support.engine.vision.vision_worker import NUM_NEW, Pixels, VisionWorker

WITH_LOGPROBS = SamplingParams(
    seed=0, max_tokens=1, temperature=0.0, num_prompt_logprobs=0, num_logprobs=3
)


@dataclass(frozen=True)
class Seeing:
    """A family's model, two of its pictures, and a prompt with them."""

    folder: Path
    model: PreTrainedModel
    encoder: LoadedEncoder
    logprobs: Callable[..., Tensor]
    pictures: tuple[Picture, Picture]

    @property
    def prompt(self) -> tuple[list[int], ImageParts]:
        first, second = self.pictures
        return prompt_with([7, 8, 9], first, [11, 12], second, [13, 14, 15, 16])

    def worker(self, **options) -> VisionWorker:
        return VisionWorker(self.folder, self.encoder, Pixels(*self.pictures), **options)


def prompt_with(*parts: list[int] | Picture) -> tuple[list[int], ImageParts]:
    """As the one of SmolVLM's tests, for pictures of one tile of any size, too."""
    token_ids: list[int] = []
    images = []
    for part in parts:
        if not isinstance(part, Picture):
            token_ids += part
            continue
        rows, columns = part.grid
        is_tiled = part.pixels.shape[0] > 1 or part.grid == (0, 0)
        per_tile = TOKENS_PER_TILE if is_tiled else rows * columns
        first = len(token_ids) + 1
        for _ in part.pixels:
            token_ids += [5, *[IMAGE_TOKEN] * per_tile]
        count = len(token_ids) - first
        images.append(
            ImagePart(
                first_token=first, num_tokens=count, image_hash=part.image_hash, grid=part.grid
            )
        )
    return token_ids, tuple(images)


@pytest.fixture(scope="module", params=["llama4", "kimi"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama4":
        model, logprobs, pictures = write_llama4(folder), llama4_logprobs, tiles()
    else:
        model, logprobs, pictures = (
            write_kimi(folder),
            kimi_logprobs,
            (image(1, (2, 5)), image(2, (4, 1))),
        )
    vision = read_config(folder).vision
    assert vision is not None
    return Seeing(folder, model, load_encoder(folder, vision, "float32"), logprobs, pictures)


def tiles() -> tuple[Picture, Picture]:
    return picture(1, (1, 2)), picture(2)


@pytest_asyncio.fixture
async def worker(seeing: Seeing) -> AsyncIterator[VisionWorker]:
    worker = seeing.worker()
    yield worker
    await closed(worker)


async def closed(*workers: VisionWorker) -> None:
    for each in workers:
        await each.jobs.close()
        await each.executor.close()


async def test_logprobs_and_tokens_equal_transformers(seeing: Seeing, worker: VisionWorker) -> None:
    prompt, images = seeing.prompt
    await worker.run(worker.sequence(b"one", prompt, images, sampling=WITH_LOGPROBS))
    expected = seeing.logprobs(seeing.model, prompt, *seeing.pictures)
    found = [each.logprob for each in worker.prompt_logprobs[b"one"]]
    own = expected[:-1].gather(1, torch.tensor(prompt[1:])[:, None]).flatten()
    assert (torch.tensor(found) - own).pow(2).mean().sqrt() < 2e-5
    text = list(prompt)
    for _ in range(NUM_NEW):
        text.append(int(seeing.logprobs(seeing.model, text, *seeing.pictures)[-1].argmax()))
    assert await worker.run(worker.sequence(b"two", prompt, images)) == text[len(prompt) :]


@pytest.mark.parametrize("budget", [5, 16])
async def test_bits_do_not_depend_on_where_chunks_end(
    seeing: Seeing, worker: VisionWorker, budget: int
) -> None:
    prompt, images = seeing.prompt
    await worker.run(worker.sequence(b"one", prompt, images, sampling=WITH_LOGPROBS))
    cut = seeing.worker(budget=budget)
    text = cut.sequence(b"text", [3, 4] * 30, ())  # shares the steps
    await cut.run(cut.sequence(b"one", prompt, images, sampling=WITH_LOGPROBS), text)
    assert cut.prompt_logprobs[b"one"] == worker.prompt_logprobs[b"one"]
    assert cut.logprobs[b"one"] == worker.logprobs[b"one"]
    await closed(cut)


async def test_a_cached_prompt_needs_no_encoder_and_one_pixel_more_does(
    seeing: Seeing, worker: VisionWorker
) -> None:
    prompt, images = seeing.prompt
    first = await worker.run(worker.sequence(b"one", prompt, images))
    assert await worker.run(worker.sequence(b"two", prompt, images)) == first
    assert worker.jobs.counts.num_encoded == 2
    changed = type(seeing.pictures[1])(seeing.pictures[1].pixels.copy(), seeing.pictures[1].grid)
    changed.pixels[0, 1, 3, 2] ^= 1
    worker.fetched.by_hash[changed.image_hash] = changed.pixels
    same_ids, others = prompt_with(
        [7, 8, 9], seeing.pictures[0], [11, 12], changed, [13, 14, 15, 16]
    )
    assert same_ids == prompt
    await worker.run(worker.sequence(b"three", prompt, others))
    assert worker.jobs.counts.num_encoded == 3


async def test_kv_from_another_worker_needs_no_pixels(seeing: Seeing, worker: VisionWorker) -> None:
    prompt, images = seeing.prompt
    expected = await worker.run(worker.sequence(b"one", prompt, images))
    prefill = seeing.worker(budget=11)
    pushed = prefill.sequence(b"kv", prompt[:-1], images, sampling=None)
    prefill.engine.add(pushed)
    while pushed.state is not SequenceState.HELD:
        await prefill.turn()
        await asyncio.sleep(0)
    decode = seeing.worker()
    decode.fetched.by_hash.clear()
    reserved = decode.sequence(b"one", prompt, images)
    assert decode.engine.reserve(reserved)
    await push_kv(prefill, pushed, decode, reserved)
    decode.engine.activate(reserved, len(prompt) - 1)
    await decode.run_on()
    assert decode.tokens[b"one"] == expected
    await closed(prefill, decode)


def test_a_grid_whose_tokens_are_not_in_the_prompt_is_refused(
    seeing: Seeing, worker: VisionWorker
) -> None:
    prompt, (first, second) = seeing.prompt
    larger = ImagePart(
        first_token=second.first_token,
        num_tokens=second.num_tokens,
        image_hash=second.image_hash,
        grid=(9, 9),
    )
    with pytest.raises(InvalidRequest, match="image 2 has"):
        worker.sequence(b"one", prompt, (first, larger))
