"""Prompts with images: tokens and their bits, whatever is cached, cut or computed elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from shared.engine.batching.sequence import SequenceState
from shared.engine.models.checkpoint_config import read_config
from shared.engine.vision.image_encoder import ThreadedEncoder
from shared.engine.vision.load_encoder import LoadedEncoder, load_encoder
from shared.errors import DependencyUnavailable, InvalidRequest, OutOfMemory, StepFailed
from shared.messages import ImageParts, SamplingParams
from shared.pixels.pixel_fetcher import PixelRequest
from tests.support.engine.model_worker import push_kv
from tests.support.engine.vision.vision_models import (
    IMAGE_TOKEN,
    Picture,
    expected_logprobs,
    picture,
    prompt_with,
    write_smolvlm,
)
from tests.support.engine.vision.vision_worker import NUM_NEW, Pixels, VisionWorker, request_of

DOG, CAT = picture(1, (1, 2)), picture(2)
PROMPT, IMAGES = prompt_with([7, 8, 9], DOG, [11, 12], CAT, [13, 14, 15, 16])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("smolvlm")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return write_smolvlm(folder)


@pytest.fixture(scope="module")
def encoder(folder: Path, model: PreTrainedModel) -> LoadedEncoder:
    return load_encoder(folder, read_config(folder).vision, "float32")


@pytest.fixture
def pixels() -> Pixels:
    return Pixels(DOG, CAT)


@pytest.fixture
async def worker(folder, encoder, pixels) -> Iterator[VisionWorker]:
    worker = VisionWorker(folder, encoder, pixels)
    yield worker
    await worker.jobs.close()
    await worker.executor.close()


WITH_LOGPROBS = SamplingParams(
    seed=0, max_tokens=1, temperature=0.0, num_prompt_logprobs=0, num_logprobs=3
)


async def test_logprobs_and_tokens_equal_transformers(model, worker) -> None:
    sequence = worker.sequence(b"one", PROMPT, IMAGES, sampling=WITH_LOGPROBS)
    await worker.run(sequence)
    expected = expected_logprobs(model, PROMPT, DOG, CAT)
    found = [each.logprob for each in worker.prompt_logprobs[b"one"]]
    own = expected[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).flatten()
    assert (torch.tensor(found) - own).pow(2).mean().sqrt() < 2e-5
    tokens = await worker.run(worker.sequence(b"two", PROMPT, IMAGES))
    text = list(PROMPT)
    for _ in range(NUM_NEW):
        text.append(int(expected_logprobs(model, text, DOG, CAT)[-1].argmax()))
    assert tokens == text[len(PROMPT) :]


@pytest.mark.parametrize("budget", [5, 16, 29])
async def test_bits_do_not_depend_on_where_chunks_end(
    folder, encoder, pixels, worker, budget
) -> None:
    """Chunks of 5 and 29 end within tiles, and within blocks."""
    whole = worker.sequence(b"one", PROMPT, IMAGES, sampling=WITH_LOGPROBS)
    await worker.run(whole)
    cut = VisionWorker(folder, encoder, pixels, budget=budget)
    other = cut.sequence(b"one", PROMPT, IMAGES, sampling=WITH_LOGPROBS)
    text = cut.sequence(b"text", [3, 4] * 30, ())  # shares the steps
    await cut.run(other, text)
    assert cut.prompt_logprobs[b"one"] == worker.prompt_logprobs[b"one"]
    assert cut.logprobs[b"one"] == worker.logprobs[b"one"]
    await cut.jobs.close()
    await cut.executor.close()


async def test_a_cached_prompt_needs_neither_pixels_nor_encoder(worker, pixels) -> None:
    first = await worker.run(worker.sequence(b"one", PROMPT, IMAGES))
    assert (worker.jobs.counts.num_encoded, pixels.num_fetches) == (2, 2)
    again = worker.sequence(b"two", PROMPT, IMAGES)
    assert await worker.run(again) == first
    assert again.num_cached_tokens == len(PROMPT) // 16 * 16
    assert (worker.jobs.counts.num_encoded, pixels.num_fetches) == (2, 2)


async def test_blocks_of_images_count_against_their_tenants_quota(worker, pixels) -> None:
    first = await worker.run(worker.sequence(b"one", PROMPT, IMAGES, kv_quota_tokens=16))
    other = await worker.run(worker.sequence(b"other", PROMPT, IMAGES, tenant="b"))
    pool = worker.engine.pool
    assert (pool.num_blocks_of("a"), pool.num_blocks_of("b")) == (1, len(PROMPT) // 16)
    again = worker.sequence(b"two", PROMPT, IMAGES, kv_quota_tokens=16)
    assert await worker.run(again) == first == other
    assert again.num_cached_tokens <= 16
    assert (worker.jobs.counts.num_encoded, pixels.num_fetches) == (4, 4)  # vectors are no KV


async def test_an_image_behind_another_text_is_encoded_once_for_a_tenant(worker, pixels) -> None:
    token_ids, images = prompt_with([21, 22], CAT, [23, 24])
    many = [worker.sequence(b"%d" % i, [30 + i, *token_ids], _moved(images, 1)) for i in range(8)]
    await worker.run(*many)
    assert (worker.jobs.counts.num_encoded, pixels.num_fetches) == (1, 1)
    await worker.run(worker.sequence(b"other", token_ids, images, tenant="b"))
    assert (worker.jobs.counts.num_encoded, pixels.num_fetches) == (2, 2)


def _moved(images: ImageParts, by: int) -> ImageParts:
    return tuple(
        msgspec.structs.replace(each, first_token=each.first_token + by) for each in images
    )


async def test_one_pixel_more_is_another_prompt(worker, pixels) -> None:
    changed = Picture(CAT.pixels.copy())
    changed.pixels[0, 1, 7, 3] ^= 1
    pixels.by_hash[changed.image_hash] = changed.pixels
    parts = [1, 2, 3], [13] * 40
    token_ids, images = prompt_with(parts[0], CAT, parts[1])
    same_ids, others = prompt_with(parts[0], changed, parts[1])
    assert same_ids == token_ids
    await worker.run(worker.sequence(b"one", token_ids, images))
    other = worker.sequence(b"two", token_ids, others)
    await worker.run(other)
    assert other.num_cached_tokens == 0
    assert worker.jobs.counts.num_encoded == 2


async def test_kv_from_another_worker_needs_no_pixels(folder, encoder, pixels, worker) -> None:
    expected = await worker.run(worker.sequence(b"one", PROMPT, IMAGES))
    prefill = VisionWorker(folder, encoder, pixels, budget=11)
    pushed = prefill.sequence(b"kv", PROMPT[:-1], IMAGES, sampling=None)
    prefill.engine.add(pushed)
    while pushed.state is not SequenceState.HELD:
        await prefill.turn()
        await asyncio.sleep(0)
    none = Pixels()
    decode = VisionWorker(folder, encoder, none)
    reserved = decode.sequence(b"one", PROMPT, IMAGES)
    assert decode.engine.reserve(reserved)
    await push_kv(prefill, pushed, decode, reserved)
    decode.engine.activate(reserved, len(PROMPT) - 1)
    await decode.run_on()
    assert decode.tokens[b"one"] == expected
    assert none.num_fetches == 0
    for each in (prefill, decode):
        await each.jobs.close()
        await each.executor.close()


async def test_text_goes_on_while_an_image_is_awaited(worker, pixels) -> None:
    came = asyncio.Event()
    fetch = pixels.fetch

    async def late(request: PixelRequest, deadline_s: float) -> memoryview:
        await came.wait()
        return await fetch(request, deadline_s)

    worker.jobs._fetch = late
    with_image = worker.sequence(b"image", PROMPT, IMAGES)
    text = worker.sequence(b"text", [3, 4, 5], ())
    for each in (with_image, text):
        worker.engine.add(each)
    while b"text" not in worker.endings:
        await worker.turn()
    assert with_image.num_computed_tokens == IMAGES[0].first_token
    came.set()
    await worker.run_on()
    assert len(worker.tokens[b"image"]) == NUM_NEW


async def test_many_images_of_a_tenant_do_not_delay_those_of_another(worker, pixels) -> None:
    many = [picture(100 + number) for number in range(6)]
    pixels.by_hash |= {each.image_hash: each.pixels for each in many}
    sequences = [
        worker.sequence(b"a%d" % number, *prompt_with([number], each, [2]))
        for number, each in enumerate(many)
    ]
    sequences.append(worker.sequence(b"b", *prompt_with([1], CAT, [2]), tenant="b"))
    await worker.run(*sequences)
    fetched = [each.tobytes() for each in pixels.fetched]
    assert fetched.index(CAT.pixels.tobytes()) <= 2  # after two of the first tenant


async def test_a_request_that_ends_leaves_the_image_to_those_who_wait(worker, pixels) -> None:
    pixels.failing = {"one"}
    await worker.run(
        worker.sequence(b"one", PROMPT, IMAGES), worker.sequence(b"two", PROMPT, IMAGES)
    )
    assert isinstance(worker.endings[b"one"].error, DependencyUnavailable)
    assert len(worker.tokens[b"two"]) == NUM_NEW


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (MemoryError(), OutOfMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfMemory),
        (ValueError("bad"), StepFailed),
    ],
)
async def test_a_failed_encoder_fails_that_request_alone(worker, encoder, raised, expected) -> None:
    class Failing:
        config, vector_bytes = encoder.config, encoder.vector_bytes
        init_thread, check = encoder.init_thread, encoder.check

        def encode_tile(self, tile: NDArray[np.uint8]) -> bytes:
            raise raised

    working = worker.jobs._encoder
    worker.jobs._encoder = ThreadedEncoder(Failing())
    await worker.run(worker.sequence(b"one", PROMPT, IMAGES), worker.sequence(b"two", [3, 4], ()))
    assert isinstance(worker.endings[b"one"].error, expected)
    assert len(worker.tokens[b"two"]) == NUM_NEW
    worker.jobs._encoder = working
    assert len(await worker.run(worker.sequence(b"three", PROMPT, IMAGES))) == NUM_NEW


async def test_a_preempted_sequence_takes_its_images_again(folder, encoder, pixels, worker) -> None:
    prompts = {b"%d" % i: [20 + i, *PROMPT] for i in range(4)}
    images = _moved(IMAGES, 1)
    expected = {}
    for name, token_ids in prompts.items():
        expected[name] = await worker.run(worker.sequence(name, token_ids, images))
    small = VisionWorker(folder, encoder, pixels, num_blocks=17, cache_bytes=0)
    long = SamplingParams(seed=0, max_tokens=60, temperature=0.0, ignore_eos=True)
    await small.run(*(small.sequence(n, ids, images, sampling=long) for n, ids in prompts.items()))
    assert small.engine.batcher.num_preemptions > 0
    for name, tokens in expected.items():
        assert small.tokens[name][:NUM_NEW] == tokens
    await small.jobs.close()
    await small.executor.close()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (lambda: (IMAGES[0], IMAGES[0]), "overlap"),
        (lambda: _moved(IMAGES, 9), "image 1 has"),
    ],
)
def test_images_that_are_not_in_the_prompt_are_refused(worker, images, message) -> None:
    with pytest.raises(InvalidRequest, match=message):
        worker.sequence(b"one", PROMPT, images())


def test_an_image_that_no_gateway_holds_is_refused(worker) -> None:
    """Its pixels would take 113 MB of a prefill worker."""
    giant = msgspec.structs.replace(IMAGES[0], first_token=0, num_tokens=1000, grid=(256, 256))
    with pytest.raises(InvalidRequest, match="has more bytes than"):
        worker.sequence(b"one", [IMAGE_TOKEN] * 10, (giant,))


def test_an_image_token_without_an_image_is_a_word() -> None:
    assert prompt_with([IMAGE_TOKEN])[1] == ()


async def test_nothing_of_a_zero_retention_tenant_stays(worker, pixels) -> None:
    request = msgspec.structs.replace(request_of("one", PROMPT, IMAGES), is_zero_retention=True)
    sequence = worker.sequence(b"one", PROMPT, ())
    sequence.image_parts = IMAGES
    (wanted,) = worker.images.attach(request, request.prompt_token_ids, (sequence,))
    worker.engine.add(sequence)
    while not wanted._images[0].is_ready:
        await worker.turn()
        await asyncio.sleep(0)
    vectors = wanted._images[0].wanted.vectors
    assert any(vectors)
    worker.engine.abort(sequence)
    wanted.close()
    assert not any(vectors)
    assert not pixels.fetched[0].any()
    assert worker.jobs._cache.num_bytes == 0


async def test_the_images_of_a_removed_tenant_are_forgotten(worker, pixels) -> None:
    for tenant in ("a", "b"):
        await worker.run(worker.sequence(tenant.encode(), PROMPT, IMAGES, tenant=tenant))
    before = worker.jobs._cache.num_bytes
    worker.images.drop_tenant("a")
    assert worker.jobs._cache.num_bytes == before / 2
    text = prompt_with([1], DOG, [2])
    await worker.run(worker.sequence(b"b again", *text, tenant="b"))
    assert worker.jobs.counts.num_encoded == 4
    await worker.run(worker.sequence(b"a again", *text, tenant="a"))
    assert worker.jobs.counts.num_encoded == 5


async def test_the_cache_keeps_the_images_used_last(folder, encoder, pixels) -> None:
    first, second, third = (picture(seed) for seed in (11, 12, 13))
    pixels.by_hash |= {each.image_hash: each.pixels for each in (first, second, third)}
    worker = VisionWorker(folder, encoder, pixels, cache_bytes=2 * 9 * encoder.vector_bytes)
    for index, each in enumerate((first, second, first, third, first)):  # two fit
        await worker.run(worker.sequence(b"%d" % index, *prompt_with([index], each, [2])))
    assert worker.jobs.counts.num_encoded == 3
    await worker.jobs.close()
    await worker.executor.close()
