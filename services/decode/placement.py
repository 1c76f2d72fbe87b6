"""One try of a request on this worker.

receiving ──KV here, or computed locally──▶ decoding ──finish──▶ ended (kept by the emitter)
every state ──abort, lease lost, deadline──▶ gone
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.engine.sequence import Sequence
from shared.errors import InvalidRequest
from shared.messages import Request, Served
from shared.packing import unpack_hashes, unpack_token_ids

from .handoff import Delivery, Handoff

# Values that tell of a prompt, which go to the gateway in one message: some 15 bytes each.
MAX_PROMPT_LOGPROBS = 200_000


@dataclass(slots=True, kw_only=True)
class Placement:
    placement_id: bytes
    request: Request
    sequence: Sequence
    deadline_at: float
    handoff: Handoff | None = None
    delivery: Delivery | None = None
    has_emitted: bool = False

    @property
    def served(self) -> Served:
        sequence, delivery = self.sequence, self.delivery
        if delivery is None or delivery.prefill_worker_id is None:
            return Served(
                num_cached_tokens=min(sequence.num_cached_tokens, self._num_prompt_tokens),
                prefill_worker_id=None,
                num_pushed_tokens=0 if delivery is None else delivery.num_pushed_tokens,
                num_preemptions=sequence.num_preemptions,
            )
        return Served(
            num_cached_tokens=min(delivery.num_cached_tokens, self._num_prompt_tokens),
            prefill_worker_id=delivery.prefill_worker_id,
            num_pushed_tokens=delivery.num_pushed_tokens,
            num_preemptions=sequence.num_preemptions,
        )

    @property
    def _num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens


def sequence_of(
    placement_id: bytes, request: Request, *, eos_token_ids: frozenset[int]
) -> Sequence:
    """Raises InvalidRequest for a request that cannot be run."""
    if len(request.choices) != 1:
        raise InvalidRequest(f"{len(request.choices)} choices in one placement", param="n")
    prompt = unpack_token_ids(request.prompt_token_ids)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="messages")
    choice, sampling = request.choices[0], request.sampling
    num_told = len(prompt) * (1 + (sampling.num_prompt_logprobs or 0))
    if sampling.num_prompt_logprobs is not None and num_told > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"logprobs of this prompt are {num_told} values, more than {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )
    stop_token_ids = frozenset(sampling.stop_token_ids)
    return Sequence(
        sequence_id=placement_id,
        tenant_id=request.tenant_id,
        cache_root=request.cache_root,
        token_ids=prompt + unpack_token_ids(choice.output_token_ids),
        num_prompt_tokens=len(prompt),
        block_hashes=unpack_hashes(request.block_hashes),
        sampling=sampling if request.pooling is None else None,
        pooling=request.pooling,
        choice_index=choice.choice_index,
        stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | eos_token_ids,
    )
