"""What a request gives without any fault: each choice computed alone, by the formula's own words.

Independent of engine, batcher and block pool: no batch, no blocks, no chunks, no preemption.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from shared.engine.batcher import ScheduledSequence
from shared.engine.inputs import build_inputs
from shared.engine.runner import SamplingInputs
from shared.engine.sequence import Sequence
from shared.engine.timing_engine import FIRST_TOKEN_ID, STATE_BYTES, _adjustments
from shared.messages import SamplingParams, TokenLogprobs
from tests.simulation.plan import BLOCK_SIZE, RequestPlan

VOCAB_SIZE = 32_000
NUM_TOKENS = VOCAB_SIZE - FIRST_TOKEN_ID
EOS = frozenset({2})


@dataclass
class Expected:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None  # None: the client's stop string ends it


def expected_of(plan: RequestPlan) -> list[Expected]:
    states = states_of(plan.prompt)
    return [_choice(plan, index, states[-1]) for index in range(plan.num_choices)]


def expected_prompt_logprobs(plan: RequestPlan) -> tuple[TokenLogprobs, ...]:
    count = plan.sampling.num_prompt_logprobs
    if count is None:
        return ()
    states = states_of(plan.prompt)
    return tuple(
        _told(state, token_id, count)
        for state, token_id in zip(states, plan.prompt[1:], strict=False)
    )


def _choice(plan: RequestPlan, choice_index: int, state: bytes) -> Expected:
    params, found = plan.sampling, Expected()
    while True:
        token_id = _draw(plan, choice_index, state, found.token_ids)
        is_stop = token_id in params.stop_token_ids or token_id in EOS
        if is_stop and len(found.token_ids) >= params.min_tokens:
            found.finish_reason = "stop"
            return found
        found.token_ids.append(token_id)
        if params.num_logprobs is not None:
            found.logprobs.append(_told(state, token_id, params.num_logprobs))
        if plan.stop_modulus and token_id % plan.stop_modulus == 0:
            return found
        if len(found.token_ids) >= params.max_tokens:
            found.finish_reason = "length"
            return found
        position = len(plan.prompt) + len(found.token_ids) - 1
        state = _next_state(state, token_id, position)


def _draw(plan: RequestPlan, choice_index: int, state: bytes, output: list[int]) -> int:
    params = plan.sampling
    processed = state + _noise(params, choice_index) + _changes(plan, output)
    banned = {*params.stop_token_ids, *EOS} if len(output) < params.min_tokens else ()
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


def _changes(plan: RequestPlan, output: list[int]) -> bytes:
    """What bias and penalties add, in the words of the step's inputs."""
    params = plan.sampling
    plain = params.frequency_penalty == 0 and params.repetition_penalty == 1
    if plain and params.presence_penalty == 0 and not params.logit_bias:
        return b""
    return _adjustments(_inputs_of(plan, output), 0)


def _inputs_of(plan: RequestPlan, output: list[int]) -> SamplingInputs:
    token_ids = [*plan.prompt, *output]
    sequence = Sequence(
        sequence_id=b"",
        tenant_id="",
        cache_root=b"",
        token_ids=token_ids,
        num_prompt_tokens=len(plan.prompt),
        sampling=plan.sampling,
    )
    sequence.num_computed_tokens = len(token_ids) - 1
    sequence.block_table = [0] * (len(token_ids) // BLOCK_SIZE + 1)
    return build_inputs([ScheduledSequence(sequence, 1)], BLOCK_SIZE).sampling


def states_of(token_ids: Iterable[int]) -> list[bytes]:
    """The KV of each token."""
    states, state = [], b""
    for position, token_id in enumerate(token_ids):
        state = _next_state(state, token_id, position)
        states.append(state)
    return states


def _next_state(state: bytes, token_id: int, position: int) -> bytes:
    word = token_id.to_bytes(8, "little") + position.to_bytes(8, "little")
    return blake2b(word, key=state, digest_size=STATE_BYTES).digest()


def _token_id(state: bytes, rank: int) -> int:
    number = int.from_bytes(blake2b(state, digest_size=8).digest(), "little")
    return FIRST_TOKEN_ID + (number + rank) % NUM_TOKENS


def _told(state: bytes, token_id: int, num_likeliest: int) -> TokenLogprobs:
    rank = (token_id - _token_id(state, 0)) % NUM_TOKENS
    ranks = range(num_likeliest)
    return TokenLogprobs(
        -(rank + 1) * math.log(2),
        tuple(_token_id(state, each) for each in ranks),
        tuple(-(each + 1) * math.log(2) for each in ranks),
    )
