"""Hostile images over every dialect: no answer is a 5xx, and their process stays small."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.images.conftest import MODEL, Eyes, base64_of
from tests.services.gateway.images.test_images_http import (
    ACCOUNT,
    CALL,
    TEXT,
    chat,
    image_part,
    message,
    text_part,
)
from tests.support.corpora.hostile_images import hostile_image, hostile_url

COUNT, LONG_COUNT = 60, 2000
CONCURRENCY = 4
JSON = {"content-type": "application/json"}
MAX_PROCESS_BYTES = 200 << 20


def requests(number: int) -> tuple[str, dict[str, Any]]:
    """The path and the body with an image: the next of the places in which one may be."""
    data, media_type = hostile_image(number)
    url = hostile_url(number)
    block = {
        "type": "image",
        "source": {"type": "base64", "media_type": media_type, "data": base64_of(data)},
    }
    part = {"type": "input_image", "image_url": url}
    use = {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}],
    }
    places: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", chat(image_part(url), text_part())),
        ("/v1/chat/completions", chat(image_part(url), user="u" * (260 << 10))),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": TEXT},
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "call_1", "content": [image_part(url)]},
                ]
            },
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [part]}]}),
        (
            "/v1/responses",
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "c", "output": [part]},
                ]
            },
        ),
        ("/v1/messages", message(block)),
        (
            "/v1/messages",
            {
                **message(),
                "messages": [
                    {"role": "user", "content": TEXT},
                    use,
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": "t", "content": [block]}
                        ],
                    },
                ],
            },
        ),
        (f"{ACCOUNT}/{MODEL}", {"prompt": TEXT, "image": base64_of(data)}),
        (f"{ACCOUNT}/{MODEL}", {"prompt": TEXT, "image": [*data]}),
        (f"{ACCOUNT}/{MODEL}", chat(image_part(url))),
        ("/tokenize", chat(image_part(url))),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": message(block)["messages"]}),
        ("/v1/prefixes/dry_run", {"request": chat(image_part(url))}),
    ]
    path, body = places[number % len(places)]
    return path, {"model": MODEL, **body}


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = (line for line in lines if line.startswith("VmHWM"))
    return int(found.split()[1]) << 10


async def statuses(eyes: Eyes, count: int) -> Counter[tuple[str, int]]:
    seen: Counter[tuple[str, int]] = Counter()
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            path, body = requests(number)
            data = json.dumps(body).encode()  # a lone surrogate is escaped
            response = await eyes.http.post(path, content=data, headers=JSON)
            while response.status_code == 429:  # other tests have the cores: it waited too long
                response = await eyes.http.post(path, content=data, headers=JSON)
            seen[path.removesuffix(MODEL), response.status_code] += 1
            assert response.status_code in (200, 400, 413), (number, path, response.text)

    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    return seen


@pytest.mark.parametrize("count", [COUNT, pytest.param(LONG_COUNT, marks=pytest.mark.long)])
async def test_no_hostile_image_fails_the_server(eyes: Eyes, count: int) -> None:
    pool = eyes.gateway._models.pools.requests
    num_lost = pool.num_lost
    seen = await statuses(eyes, count)
    print(sorted(seen.items()))
    assert pool.num_lost == num_lost
    peaks = [peak_bytes(each) for each in pool.process_ids]
    print([each >> 20 for each in peaks], "MiB")
    assert max(peaks) <= MAX_PROCESS_BYTES
    await eyes.ended()
