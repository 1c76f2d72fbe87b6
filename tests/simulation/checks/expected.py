"""A request's output without any fault: each choice computed alone, directly by the formula.

Independent of engine, batcher and block pool: no batch, no blocks, no chunks, no preemption.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from shared.engine.executors.timing_executor import FIRST_TOKEN_ID, STATE_BYTES
from shared.messages import SamplingParams, TokenLogprobs
from tests.simulation.plan import RequestPlan

VOCAB_SIZE = 32_000
NUM_TOKENS = VOCAB_SIZE - FIRST_TOKEN_ID
EOS = frozenset({2})
NO_VARIANTS: Mapping[int, int] = {}


@dataclass
class Expected:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None  # None: the client's stop string ends it
    embedding: bytes | None = None


def expected_of(plan: RequestPlan, variants: Sequence[Mapping[int, int]]) -> list[Expected]:
    """`variants`: for each choice the variants of the devices that computed it, by position."""
    if plan.pooling is not None:
        variant = variants[0].get(0, 0)
        return [Expected(finish_reason="stop", embedding=_embedding(plan, variant))]
    state = states_of(plan.prompt)[-1]
    return [
        expected_choice(plan, index, state, variants[index]) for index in range(plan.num_choices)
    ]


def expected_prompt_logprobs(plan: RequestPlan, variant: int) -> tuple[TokenLogprobs, ...]:
    """`variant`: of the device that computed the prompt."""
    count = plan.sampling.num_prompt_logprobs
    if count is None:
        return ()
    states = states_of(plan.prompt, variant)
    return tuple(
        _logprobs_of(state, token_id, count)
        for state, token_id in zip(states, plan.prompt[1:], strict=False)
    )


def expected_choice(
    plan: RequestPlan, choice_index: int, state: bytes, variants: Mapping[int, int] = NO_VARIANTS
) -> Expected:
    """`state`: the KV of the prompt's last token. Where another worker continues, it computes the
    KV of all tokens before.
    """
    params, found, variant = plan.sampling, Expected(), 0
    noise, counts = _noise(params, choice_index), dict.fromkeys(plan.prompt, 0)
    while True:
        if variants.get(len(found.token_ids), variant) != variant:
            variant = variants[len(found.token_ids)]
            state = states_of((*plan.prompt, *found.token_ids), variant)[-1]
        processed = state + noise + _bias(params) + _penalties(params, counts)
        token_id = _sample(params, processed, len(found.token_ids))
        is_stop = token_id in params.stop_token_ids or token_id in EOS
        if is_stop and len(found.token_ids) >= params.min_tokens:
            found.finish_reason = "stop"
            return found
        found.token_ids.append(token_id)
        counts[token_id] = counts.get(token_id, 0) + 1
        if params.num_logprobs is not None:
            found.logprobs.append(_logprobs_of(state, token_id, params.num_logprobs))
        if plan.stop_modulus and token_id % plan.stop_modulus == 0:
            return found
        if len(found.token_ids) >= params.max_tokens:
            found.finish_reason = "length"
            return found
        position = len(plan.prompt) + len(found.token_ids) - 1
        state = _next_state(state, token_id, position, variant)


def _sample(params: SamplingParams, processed: bytes, num_sampled: int) -> int:
    banned = {*params.stop_token_ids, *EOS} if num_sampled < params.min_tokens else ()
    first = _token_id(processed, 0)
    for rank in range(NUM_TOKENS):
        token_id = FIRST_TOKEN_ID + (first - FIRST_TOKEN_ID + rank) % NUM_TOKENS
        if token_id not in banned:
            return token_id
    return first


def _noise(params: SamplingParams, choice_index: int) -> bytes:
    if params.temperature == 0:
        return b""
    return params.seed.to_bytes(8, "little") + choice_index.to_bytes(8, "little")


def _embedding(plan: RequestPlan, variant: int) -> bytes:
    """The bytes of the last state, or their mean over all states, as numbers."""
    states = np.array([list(state) for state in states_of(plan.prompt, variant)], dtype=np.float32)
    pooled = states[-1] if plan.pooling == "last" else states.sum(0) / np.float32(len(states))
    return pooled.astype("<f4").tobytes()


def _bias(params: SamplingParams) -> bytes:
    token_ids = array("q", (token_id for token_id, _ in params.logit_bias))
    return token_ids.tobytes() + array("f", (value for _, value in params.logit_bias)).tobytes()


def _penalties(params: SamplingParams, counts: dict[int, int]) -> bytes:
    """`counts`: of each distinct token in the output, in the order of first appearance."""
    frequency, presence = params.frequency_penalty, params.presence_penalty
    if frequency == 0 and presence == 0 and params.repetition_penalty == 1:
        return b""
    repetition = array("f", (params.repetition_penalty,)) * len(counts)
    of_output = np.array(list(counts.values()))
    subtracted = frequency * of_output + presence * (of_output > 0)
    token_ids = array("q", counts)
    return token_ids.tobytes() + repetition.tobytes() + subtracted.astype(np.float32).tobytes()


def states_of(token_ids: Iterable[int], variant: int = 0) -> list[bytes]:
    """The KV of each token."""
    states, state = [], b""
    for position, token_id in enumerate(token_ids):
        state = _next_state(state, token_id, position, variant)
        states.append(state)
    return states


def _next_state(state: bytes, token_id: int, position: int, variant: int) -> bytes:
    word = token_id.to_bytes(8, "little") + position.to_bytes(8, "little")
    salt = variant.to_bytes(8, "little")
    return blake2b(word, key=state, salt=salt, digest_size=STATE_BYTES).digest()


def _token_id(state: bytes, rank: int) -> int:
    number = int.from_bytes(blake2b(state, digest_size=8).digest(), "little")
    return FIRST_TOKEN_ID + (number + rank) % NUM_TOKENS


def _logprob(rank: int) -> float:
    """FP32, as the wire and its packed form carry it."""
    return array("f", (-(rank + 1) * math.log(2),))[0]


def _logprobs_of(state: bytes, token_id: int, num_top_logprobs: int) -> TokenLogprobs:
    rank = (token_id - _token_id(state, 0)) % NUM_TOKENS
    ranks = range(num_top_logprobs)
    return TokenLogprobs(
        _logprob(rank),
        tuple(_token_id(state, each) for each in ranks),
        tuple(_logprob(each) for each in ranks),
    )
