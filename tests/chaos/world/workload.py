"""The clients' requests: a mix of all features whose state must survive a change of worker.

Stop strings require known responses, so the first of two undisturbed runs determines them.
"""

from __future__ import annotations

import random
from typing import Any

from services.cli.cluster.service_options import DEMO_MODEL_NAME
from tests.support.cluster.clients import ChoiceOutput

NUM_STREAMS = 32
NUM_PROMPT_TOKENS = range(120, 480)
NUM_OUTPUT_TOKENS = range(60, 150)
NEVER = "\x07"  # no response contains it: ends a stop string that only matches partially

Body = dict[str, Any]


def requests(count: int = NUM_STREAMS) -> list[tuple[str, Body]]:
    """(path, body), without stop strings; the same in every run."""
    return [_request(index) for index in range(count)]


def with_stops(bodies: list[tuple[str, Body]], outputs: list[dict[int, ChoiceOutput]]) -> None:
    """Gives a quarter of the requests a string that cuts their first choice, and one that matches
    only partially and delays text until the match fails.
    """
    for index, ((_, body), output) in enumerate(zip(bodies, outputs, strict=True)):
        text = output[0].text
        if index % 8 in (2, 6) and len(text) > 40:
            middle = int(len(text) * 0.6)
            body["stop"] = [text[middle : middle + 6], text[middle // 2 :][:3] + NEVER]


def _request(index: int) -> tuple[str, Body]:
    rng = random.Random(index)
    is_chat = index % 2 == 1
    body = _chat(rng) if is_chat else _completion(rng)
    body |= {
        "model": DEMO_MODEL_NAME,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "max_tokens": rng.choice(NUM_OUTPUT_TOKENS),
        "temperature": 0,
    }
    body |= sampling_of(index, is_chat)
    return ("/v1/chat/completions" if is_chat else "/v1/completions"), body


def _chat(rng: random.Random) -> Body:
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.choice(NUM_PROMPT_TOKENS) // 3))
    return {"messages": [{"role": "user", "content": f"What is the KV cache? {words}"}]}


def _completion(rng: random.Random) -> Body:
    return {"prompt": [rng.randrange(300, 2000) for _ in range(rng.choice(NUM_PROMPT_TOKENS))]}


def sampling_of(index: int, is_chat: bool) -> Body:
    """Varies by index; greedy by default."""
    seeded = {"temperature": 0.9, "top_p": 0.95, "seed": 1000 + index}
    penalties = {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1}
    logprobs = {"logprobs": True, "top_logprobs": 3} if is_chat else {"logprobs": 3}
    return {
        0: {},
        1: seeded,
        2: seeded,  # and stop strings
        3: seeded | {"n": 2},
        4: penalties,
        5: seeded | logprobs,
        6: logprobs,  # and stop strings
        7: seeded | penalties | logprobs | {"n": 3},
    }[index % 8]


_WORDS = (
    "worker", "token", "prefix", "cache", "block", "gateway", "queue", "lease", "site", "model",
    "stream", "weights", "batch", "tenant", "region", "step",
)  # fmt: skip
