"""Images in the requests of every dialect: the same pixels and the same tokens from each."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import msgspec
import pytest

from services.gateway.dialects.preparation_process import make_body_handler
from services.gateway.images import processed
from services.gateway.images.input_image import InputImage
from services.gateway.text.process_jobs import BodyJob, ImageChatJob, Job, ProcessSetup, Reply
from services.kv_index.pins import expected_pin
from shared.block_hash import image_extras, prompt_chain, root_key
from shared.messages import DataPlaneAddress, FetchPixels, Request
from shared.packing import pack_hashes
from shared.pixels.pixel_holder import StoredImage
from shared.tenancy.prefixes import pinned_prefix
from shared.tenancy.prefixes.pinned_prefix import request_of_prefix
from shared.tenancy.prefixes.public_prefixes import PublicPrefixes
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import SECRET
from tests.services.gateway.images.conftest import MODEL, Eyes, base64_of, data_url, picture
from tests.services.gateway.images.test_image_fetcher import fetcher, listening, sends
from tests.support.services.vision_dir import TILE, TOKENS_PER_TILE
from tests.support.waiting import until

PICTURE = picture()
GRID = (3, 4)  # 100 x 60 pixels become 128 x 96
NUM_TILES = 13
TEXT = "What is in it?"
URL = data_url(PICTURE)
CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ACCOUNT = "/client/v4/accounts/tenant-1/ai/run"


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": [*parts]}], **more}


def image_part(url: str = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text_part(text: str = TEXT) -> dict[str, Any]:
    return {"type": "text", "text": text}


def source(data: str = base64_of(PICTURE), media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "base64", "media_type": media_type, "data": data}


def message(*blocks: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 9,
        "messages": [{"role": "user", "content": [*blocks]}],
    }


DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", chat(image_part(), text_part())),
    "chat, a text for a URL": (
        "/v1/chat/completions",
        chat({"type": "image_url", "image_url": URL}, text_part()),
    ),
    "responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": URL, "detail": "auto"},
                        {"type": "input_text", "text": TEXT},
                    ],
                }
            ],
        },
    ),
    "messages": ("/v1/messages", message({"type": "image", "source": source()}, text_part())),
    "workers ai, a part": (f"{ACCOUNT}/{MODEL}", chat(image_part(), text_part())),
    "workers ai, base64": (f"{ACCOUNT}/{MODEL}", {"prompt": TEXT, "image": base64_of(PICTURE)}),
    "workers ai, numbers": (
        f"{ACCOUNT}/{MODEL}",
        {"messages": [{"role": "user", "content": TEXT}], "image": [*PICTURE]},
    ),
}
RESULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": TEXT},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": [text_part(), image_part()]},
            ],
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "input": [
                {"role": "user", "content": TEXT},
                {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "call_1",
                    "output": [
                        {"type": "input_text", "text": TEXT},
                        {"type": "input_image", "image_url": URL},
                    ],
                },
            ],
        },
    ),
    "messages": (
        "/v1/messages",
        {
            "model": MODEL,
            "max_tokens": 9,
            "messages": [
                {"role": "user", "content": TEXT},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [text_part(), {"type": "image", "source": source()}],
                        }
                    ],
                },
            ],
        },
    ),
}


def check_chain(request: Request) -> None:
    """The blocks of the prompt are hashed with its images."""
    chain = prompt_chain(
        request.prompt_token_ids,
        request.block_size,
        cache_root=request.cache_root,
        public_root=request.public_root,
        num_public_blocks=request.num_public_blocks,
        extras=image_extras(request.images, request.block_size),
    )
    assert request.block_hashes == pack_hashes(chain)


async def test_every_dialect_sends_the_same_request(eyes: Eyes) -> None:
    found = {name: await eyes.request_of(*door) for name, door in DOORS.items()}
    (image,) = found["chat"].images
    assert image.grid == GRID
    for name, request in found.items():
        assert request.images == (image,), name
        assert request.prompt_token_ids == found["chat"].prompt_token_ids, name
        assert "images/1" in request.needs, name
        check_chain(request)


async def test_results_of_tools_have_images(eyes: Eyes) -> None:
    found = {name: await eyes.request_of(*door) for name, door in RESULTS.items()}
    (image,) = found["chat"].images
    assert all(each.images == (image,) for each in found.values())
    assert len({each.prompt_token_ids for each in found.values()}) == 1


async def test_a_large_body_is_the_same_request(eyes: Eyes) -> None:
    path, body = DOORS["chat"]
    small = await eyes.request_of(path, body)
    large = await eyes.request_of(path, {**body, "user": "u" * (260 << 10)})
    assert (large.images, large.prompt_token_ids) == (small.images, small.prompt_token_ids)


async def test_images_between_texts_in_several_turns(eyes: Eyes) -> None:
    other = data_url(picture(seed=2))
    body = {
        "model": MODEL,
        "messages": [
            {"role": "user", "content": [text_part("one"), image_part(), text_part("two")]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": [image_part(other), image_part(detail="low")]},
        ],
    }
    request = await eyes.request_of("/v1/chat/completions", body)
    first, second, third = request.images
    assert len({each.image_hash for each in request.images}) == 3
    assert [each.grid for each in request.images] == [GRID, GRID, (0, 0)]
    assert third.num_tokens == TOKENS_PER_TILE
    assert first.first_token + first.num_tokens < second.first_token < third.first_token


async def test_usage_and_tokenize_count_images(eyes: Eyes) -> None:
    path, body = DOORS["chat"]
    usage = (await eyes.http.post(path, json=body)).json()["usage"]["prompt_tokens"]
    counted = (await eyes.http.post("/tokenize", json=body)).json()
    assert usage == counted["count"] == len(counted["tokens"]) > NUM_TILES * TOKENS_PER_TILE
    messages = {key: DOORS["messages"][1][key] for key in ("model", "messages")}
    count = await eyes.http.post("/v1/messages/count_tokens", json=messages)
    assert count.json() == {"input_tokens": usage}
    count = await eyes.http.post("/v1/responses/input_tokens", json=DOORS["responses"][1])
    assert count.json()["input_tokens"] == usage


async def test_the_list_of_models_names_images(eyes: Eyes) -> None:
    listed = (await eyes.http.get("/v1/models")).json()["data"]
    assert {each["id"]: each["input_modalities"] for each in listed} == {MODEL: ["text", "image"]}


async def test_dry_run_tells_pixels_apart(eyes: Eyes) -> None:
    body = {"request": chat(image_part()), "other": chat(image_part(data_url(picture(seed=2))))}
    report = (await eyes.http.post("/v1/prefixes/dry_run", json=body)).json()
    request = await eyes.request_of("/v1/chat/completions", body["request"])
    assert report["request"]["prompt_tokens"] == report["other"]["prompt_tokens"]
    assert report["divergence"]["token_index"] == request.images[0].first_token
    same = {"request": chat(image_part()), "other": chat(image_part())}
    report = (await eyes.http.post("/v1/prefixes/dry_run", json=same)).json()
    assert report["divergence"] is None


async def test_pixels_are_held_until_the_answer_ends(eyes: Eyes) -> None:
    eyes.worker.hold_at = 1
    eyes.worker.forget()
    async with eyes.http.stream(
        "POST", "/v1/chat/completions", json=chat(image_part(), image_part(), stream=True)
    ) as response:
        assert response.status_code == 200
        await until(lambda: bool(eyes.worker.runs))
        assert eyes.held_bytes == NUM_TILES * 3 * TILE * TILE  # once for both
        eyes.worker.hold_at = None
        eyes.worker.released.set()
        await response.aread()
    await eyes.ended()


HOSTILE: dict[str, tuple[str, str]] = {
    "http": ("https://example.com/a.png", "not fetched"),
    "no bytes": ("data:image/png;base64,", "no bytes"),
    "truncated": (data_url(PICTURE[:-500]), "cannot be decoded"),
    "svg": (data_url(b"<svg/>", "image/svg+xml"), "is not one of"),
    "svg as png": (data_url(b"<svg/>"), "not a complete image"),
    "wrong type": (data_url(PICTURE, "image/jpeg"), "the image is image/png"),
    "junk": ("data:image/png;base64,@@@@", "not base64"),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("is_large", [False, True])
async def test_what_is_no_image_is_named(eyes: Eyes, name: str, is_large: bool) -> None:
    url, reason = HOSTILE[name]
    more = {"user": "u" * (260 << 10)} if is_large else {}
    body = chat(image_part(), text_part(), image_part(url), **more)
    response = await eyes.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "messages[0].content[2]" and reason in error["message"]


SOURCES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a file of OpenAI": (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0]",
    ),
    "a URL of Anthropic": (
        "/v1/messages",
        message({"type": "image", "source": {"type": "url", "url": "https://a/b"}}),
        "messages[0].content[0]",
    ),
    "a file of Anthropic": (
        "/v1/messages",
        message({"type": "image", "source": {"type": "file", "file_id": "f"}}),
        "messages[0].content[0]",
    ),
    "a type that is not read": (
        "/v1/messages",
        message({"type": "image", "source": source(media_type="image/tiff")}),
        "messages[0].content[0]",
    ),
    "three bytes": (f"{ACCOUNT}/{MODEL}", {"prompt": TEXT, "image": [1, 2, 3]}, "image"),
    "a URL of Workers AI": (
        f"{ACCOUNT}/{MODEL}",
        {"prompt": TEXT, "image": "https://a/b.png"},
        "image",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
async def test_other_sources_are_named(eyes: Eyes, name: str) -> None:
    path, body, param = SOURCES[name]
    response = await eyes.http.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400 and param in response.text, response.text


async def test_an_image_of_a_host_that_the_operator_names(
    eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await eyes.request_of("/v1/chat/completions", chat(image_part(), text_part()))
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PICTURE)
    async with listening(sends(head + PICTURE)) as port:
        images = eyes.gateway.preparer._images
        monkeypatch.setattr(images, "_fetcher", fetcher(port))
        url = f"http://pictures.example:{port}/a.png"
        found = await eyes.request_of("/v1/chat/completions", chat(image_part(url), text_part()))
        assert [each.image_hash for each in found.images] == [
            each.image_hash for each in expected.images
        ]
        given = message({"type": "image", "source": {"type": "url", "url": url}}, text_part())
        found = await eyes.request_of("/v1/messages", {"model": MODEL, "max_tokens": 4, **given})
        assert [each.image_hash for each in found.images] == [
            each.image_hash for each in expected.images
        ]
        large = chat(image_part(url), user="u" * (260 << 10))  # read without a network
        response = await eyes.http.post("/v1/chat/completions", json=large)
        assert response.status_code == 400 and "not fetched" in response.text
        other = chat(image_part("https://other.example/a.png"))
        response = await eyes.http.post("/v1/chat/completions", json=other)
        assert response.status_code == 400 and "from https://other.example" in response.text


async def test_too_many_images_and_too_many_tokens(eyes: Eyes) -> None:
    low = image_part(detail="low")
    response = await eyes.http.post("/v1/chat/completions", json=chat(*[low] * 21))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content[20]"
    assert "limit of 20" in response.text
    large = [image_part(data_url(picture(200, 200, seed))) for seed in range(20)]
    response = await eyes.http.post("/v1/chat/completions", json=chat(*large))
    assert response.status_code in (400, 413), response.text
    await eyes.ended()


async def test_placeholders_of_a_client_are_text(eyes: Eyes) -> None:
    request = await eyes.request_of(
        "/v1/chat/completions", chat(text_part("<image><image>"), image_part())
    )
    (image,) = request.images
    assert image.grid == GRID
    request = await eyes.request_of("/v1/chat/completions", chat(text_part("<image>")))
    assert not request.images


async def test_sizes_of_bodies(eyes: Eyes) -> None:
    config = eyes.gateway._config
    padding = " " * (config.max_image_body_bytes - 100)
    large = data_url(picture(480, 480))  # 700 KB
    assert len(large) > config.max_body_bytes
    request = await eyes.request_of("/v1/chat/completions", chat(image_part(large)))
    assert request.images[0].grid == (4, 4)
    response = await eyes.http.post(
        "/v1/chat/completions", json=chat(image_part(), text_part(padding[: 400 << 10]))
    )
    assert response.status_code == 413 and "without its images" in response.text
    response = await eyes.http.post("/v1/chat/completions", json=chat(text_part(padding)))
    assert response.status_code == 413
    response = await eyes.http.post("/v1/completions", json={"prompt": padding, "model": MODEL})
    assert response.status_code == 413


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
async def test_an_image_of_numbers_is_no_text(eyes: Eyes, separators: tuple[str, str]) -> None:
    """In JSON a number takes several times its byte."""
    path, body = f"{ACCOUNT}/{MODEL}", {"prompt": TEXT, "image": [*picture(300, 300)]}

    async def answer(prompt: str) -> httpx.Response:
        data = json.dumps(body | {"prompt": prompt}, separators=separators)
        assert len(data) > 3 * eyes.gateway._config.max_body_bytes
        return await eyes.http.post(path, content=data)

    assert (await answer(TEXT)).status_code == 200
    response = await answer(TEXT + " " * eyes.gateway._config.max_body_bytes)
    assert response.status_code == 413 and "without its images" in response.text
    await eyes.ended()


PREFIX = "/v1/prefixes/p"
ROOT_KEY = root_key(SECRET)


async def stored_image(eyes: Eyes, image_hash: bytes) -> StoredImage | None:
    """Returns what a worker that computes the prefix would get."""
    command = FetchPixels(
        worker_id="decode-3",
        tenant_id="tenant-1",
        request_id=request_of_prefix("p"),
        image_hash=image_hash,
        shape=(NUM_TILES, 3, TILE, TILE),
        transfer_id=bytes(16),
        target=DataPlaneAddress(host="h", port=1, unix_path="", instance_id=b"i"),
        deadline_s=1.0,
    )
    return await eyes.gateway.pixels._find_stored(command)


async def test_a_named_prefix_has_the_tokens_of_its_images(eyes: Eyes) -> None:
    shown = chat(image_part(), text_part())
    response = await eyes.http.put(PREFIX, json=shown)
    assert response.status_code == 200, response.text
    assert response.json()["messages"][0]["content"][0] == {"type": "image"}
    asked = [*shown["messages"], {"role": "assistant", "content": "A fox."}]
    request = await eyes.request_of("/v1/chat/completions", chat() | {"messages": asked})
    prefix = await pinned_prefix.load(eyes.gateway.tenancy.stores.slow, "tenant-1", "p")
    assert prefix is not None and prefix.images[0].content == PICTURE
    assert prefix.parts == request.images
    assert request.prompt_token_ids.startswith(prefix.token_ids)
    pin = expected_pin(prefix, eyes.worker.card, PublicPrefixes(lambda: ROOT_KEY))
    assert pin is not None and pin.num_tokens > NUM_TILES * TOKENS_PER_TILE
    assert request.block_hashes.startswith(pin.command.block_hashes)
    other = msgspec.structs.replace(eyes.worker.card, revision="r2")
    assert expected_pin(prefix, other, PublicPrefixes(lambda: ROOT_KEY)) is None

    (part,) = prefix.parts
    found = await stored_image(eyes, part.image_hash)
    assert found is not None and len(await found.read()) == NUM_TILES * 3 * TILE * TILE
    assert await stored_image(eyes, bytes(16)) is None
    assert (await eyes.http.get("/v1/prefixes")).json()["data"][0]["name"] == "p"
    assert (await eyes.http.delete(PREFIX)).status_code == 200
    assert await stored_image(eyes, part.image_hash) is None


async def test_the_files_of_a_prefix_are_read_beside_the_event_loop(
    eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, threads = InputImage.content.fget, list[threading.Thread]()  # type: ignore[attr-defined]

    def content(image: InputImage) -> bytes:
        threads.append(threading.current_thread())
        return read(image)

    monkeypatch.setattr(InputImage, "content", property(content))
    assert (await eyes.http.put(PREFIX, json=chat(image_part()))).status_code == 200
    await eyes.http.delete(PREFIX)
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_an_image_of_a_prefix_is_decoded_once(
    eyes: Eyes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many continuations are tokenized, to find where the prefix ends."""
    jobs, pool = list[tuple[ProcessSetup, Job]](), eyes.gateway.preparer._pool
    run, decode, opened = pool.run, processed.decoded, list[bytes]()

    async def recorded(tenant_id: str, setup: ProcessSetup, job: Job) -> Reply:
        jobs.append((setup, job))
        return await run(tenant_id, setup, job)

    def counted(image: InputImage, *, max_pixels: int) -> Any:
        opened.append(image.content)
        return decode(image, max_pixels=max_pixels)

    monkeypatch.setattr(pool, "run", recorded)
    other = picture(seed=2)
    shown = chat(image_part(), text_part(), image_part(data_url(other)))
    assert (await eyes.http.put(PREFIX, json=shown)).status_code == 200
    await eyes.http.delete(PREFIX)
    monkeypatch.setattr(processed, "decoded", counted)
    for setup, job in jobs:  # the same work once more, where decodings are seen
        if setup.template is not None and isinstance(job, BodyJob | ImageChatJob):
            make_body_handler(setup, setup.template.compiled())(job)
    assert opened == [PICTURE, other]


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (image_part("https://example.com/a.png"), "sent as data URLs"),
        (image_part(data_url(PICTURE[:-500])), "cannot be decoded"),
    ],
)
async def test_images_that_no_prefix_holds(eyes: Eyes, part: dict[str, Any], reason: str) -> None:
    response = await eyes.http.put(PREFIX, json=chat(part))
    assert response.status_code == 400 and reason in response.text
    assert response.json()["error"]["param"] == "messages[0].content[0]"
    assert (await eyes.http.get(PREFIX)).status_code == 404


async def test_a_tenant_whose_images_may_not_be_stored(eyes: Eyes) -> None:
    response = await eyes.http.put(PREFIX, json=chat(image_part(), text_part()))
    store = eyes.gateway.tenancy.stores.slow
    prefix = await pinned_prefix.load(store, "tenant-1", "p")
    assert response.status_code == 200 and prefix is not None
    (part,), tenants = prefix.parts, TenantAdmin(store, lambda: 0.0)
    try:
        await tenants.change("tenant-1", {"is_zero_retention": True})
        eyes.gateway.api_keys._known.clear()
        response = await eyes.http.put(PREFIX, json=chat(image_part(), text_part()))
        assert response.status_code == 403 and "zero retention" in response.text
        await pinned_prefix.save(store, prefix, 0.0)  # as one that its deletion has missed
        assert await stored_image(eyes, part.image_hash) is None
    finally:
        await tenants.change("tenant-1", {"is_zero_retention": False})
        eyes.gateway.api_keys._known.clear()
    assert await stored_image(eyes, part.image_hash) is not None
    await eyes.http.delete(PREFIX)


async def test_constraints_and_tools_work_after_an_image(eyes: Eyes) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    plain = await eyes.request_of("/v1/chat/completions", chat(image_part()))
    constrained = await eyes.request_of(
        "/v1/chat/completions", chat(image_part(), response_format=form)
    )
    assert constrained.sampling.grammar is not None
    assert constrained.images == plain.images
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    with_tool = await eyes.request_of(
        "/v1/chat/completions", chat(image_part(), text_part(), tools=[tool])
    )
    (image,) = with_tool.images
    assert image.image_hash == plain.images[0].image_hash
    assert image.first_token > plain.images[0].first_token  # the tool comes before it


async def test_a_stored_response_goes_on_with_its_image(eyes: Eyes) -> None:
    path, body = DOORS["responses"]
    first = (await eyes.http.post(path, json={**body, "store": True})).json()
    await eyes.ended()
    url = f"{path}/{first['id']}/input_items"

    async def items() -> list[Any]:
        return (await eyes.http.get(url)).json().get("data") or []

    found = await until(items)
    (item,) = found
    assert item["content"][0]["image_url"] == URL and item["content"][1]["text"] == TEXT
    more = {"model": MODEL, "input": "And now?", "previous_response_id": first["id"]}
    request = await eyes.request_of(path, more)
    assert [each.grid for each in request.images] == [GRID]
