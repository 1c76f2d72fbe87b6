"""A receipt for tests that make none themselves, and requests for those that do."""

from __future__ import annotations

import random
from typing import Any

from msgspec import structs

from shared.messages import SamplingParams
from shared.packing import pack_token_ids
from shared.receipts.receipt import (
    AnswerReceipt,
    DecodeTry,
    KvHop,
    OutputHash,
    PlacedProcess,
    PromptReceipt,
    ServedWeights,
)
from shared.receipts.salted import SALT_BYTES, ReceiptSalt

RECEIPT_SALT = ReceiptSalt(b"s" * SALT_BYTES)
PROMPT, ANSWER = [1, 2, 3], [4, 5]
NUMERICS = "exact/cpu-avx512/float32/k2/lanes1/plain/tp0"
WORDS = ("cache", "token", "prefix", "worker", "block", "gateway", "queue", "model", "stream")
RUN = "/client/v4/accounts/default/ai/run/{model}"


def receipt(
    *,
    salt: ReceiptSalt = RECEIPT_SALT,
    prompt: list[int] = PROMPT,
    answer: list[int] = ANSWER,
    region: str = "eu",
    weights: str = "digest-1",
    numerics: str = NUMERICS,
    outcome: str = "stop",
    seed: int = 7,
    temperature: float = 1.0,
    **fields: Any,
) -> AnswerReceipt:
    """One prompt with one choice. `fields` are those of the receipt."""
    prefill = PlacedProcess(id="prefill-1", site="a", region=region)
    params = SamplingParams(seed=seed, max_tokens=5, temperature=temperature)
    attempt = DecodeTry(
        decode=PlacedProcess(id="decode-1", site="a", region=region),
        prefill=prefill,
        kv_hops=(KvHop(source=prefill, num_tokens=2),),
        numerics=numerics,
        num_tokens=len(answer),
        outcome="finished",
    )
    tokens = salt.output(0, 0, pack_token_ids(answer))
    one = PromptReceipt(
        num_prompt_tokens=len(prompt),
        prompt=salt.prompt(0, pack_token_ids(prompt)),
        sampling=salt.sampling(0, params, ()),
        choices=(OutputHash(num_tokens=len(answer), tokens=tokens, outcome=outcome),),
        tries=(attempt,),
    )
    found = AnswerReceipt(
        request_id="r-1",
        tenant="t",
        gateway=PlacedProcess(id="gateway-1", site="a", region=region),
        release="0.1",
        endpoint="chat",
        model=ServedWeights(name="tiny", weights=weights),
        retention="standard",
        region_class="",
        allowed_regions=None,
        received_at=1000.0,
        first_token_at=1000.5,
        finished_at=1001.0,
        salt=salt.commitment,
        prompts=(one,),
    )
    return structs.replace(found, **fields)


def receipt_requests(count: int, model: str) -> list[tuple[str, dict[str, Any]]]:
    """Paths and bodies of each dialect, with and without a seed, some of several choices or
    prompts. The model is that of `hearth up`.
    """
    return [_request(random.Random(number), number, model) for number in range(count)]


def _request(rng: random.Random, number: int, model: str) -> tuple[str, dict[str, Any]]:
    text = f"{number}: {' '.join(rng.choices(WORDS, k=rng.randrange(2, 60)))}?"
    messages, few = [{"role": "user", "content": text}], {"max_tokens": 8, "temperature": 1.2}
    seed = {"seed": number} if number % 2 else {}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": messages, **few, **seed, "n": 1 + number % 3}),
        ("/v1/chat/completions", {"messages": messages, **few, **seed, "stop": ["e"]}),
        ("/v1/completions", {"prompt": [text, text], **few, **seed}),
        ("/v1/messages", {"model": model, "messages": messages, **few}),
        ("/v1/responses", {"input": text, "max_output_tokens": 8, "temperature": 1.2}),
        (RUN.format(model=model), {"messages": messages, **few}),
        ("/v1/embeddings", {"input": [text, "another"]}),
        ("/v1/chat/completions", {"messages": messages, **few, **seed, "stream": True}),
    ]
    return bodies[number % len(bodies)]
