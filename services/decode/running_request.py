"""One attempt of a request on this worker: a prompt, and the choices that continue it.

receiving ──KV complete──▶ choices decode ──all finish, or are aborted──▶ ended (output buffered)
computing the prompt ──▲
every state ──abort, lease lost, deadline──▶ removed

The KV of a prompt that several choices share is computed, or received, once, except for the last
token: each choice computes that token, because each samples with different noise. The first choice
returns the prompt's logprobs; several choices have them computed with the shared prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from services.decode.handoff import Handoff, HandoffResult
from services.decode.phase_times import PhaseTimes
from shared.engine.batching.sequence import Sequence, SequenceState, build_sequence
from shared.engine.vision.sequence_images import WantedImages
from shared.errors import InvalidRequest
from shared.messages import Choice, ModelCard, Request, SamplingParams, Served
from shared.numerics import Numerics
from shared.output.packed_logprobs import MAX_LOGPROB_BYTES, packed_bytes
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, unpack_token_ids

# Logprob values of one prompt, sent to the gateway in one message: about 15 bytes each.
MAX_PROMPT_LOGPROBS = 200_000
MAX_CHOICES = 128
CHOICE_ID_BYTES = 8  # suffix of a sequence id, after the placement id
_PROMPT_ID = b"\xff" * CHOICE_ID_BYTES  # no choice has this id: choice indices are below 2**63


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    placement_id: bytes
    request: Request
    prompt: Sequence  # a single choice serves as the prompt
    choices: dict[int, Sequence]  # unfinished choices by choice_index
    numerics: Numerics  # the worker's numerics
    deadline_at: float
    flushed_at: float  # time of the last update to its gateway
    times: PhaseTimes
    # that may have its data; None: all
    regions: frozenset[str] | None = None
    # of prefill workers at other sites, as the scheduler says
    site_regions: Mapping[str, str] = field(default_factory=dict)
    prefill_id: bytes | None = None  # placement id of the prefill at another worker
    handoff: Handoff | None = None
    delivery: HandoffResult | None = None
    images: tuple[WantedImages, ...] = ()

    def close_images(self) -> None:
        """Gives up what its sequences wait for. Idempotent."""
        for each in self.images:
            each.close()

    @property
    def is_forked(self) -> bool:
        """Whether the engine computes the choices, and no longer the shared prompt."""
        return not self.prompt.is_prefill_only or self.prompt.state is SequenceState.FINISHED

    @property
    def in_engine(self) -> list[Sequence]:
        """The sequences that the engine runs now or will run first."""
        return list(self.choices.values()) if self.is_forked else [self.prompt]

    @property
    def is_waiting(self) -> bool:
        """Whether all of it waits for blocks or rows: none of it is in the engine's batch."""
        return all(each.state is SequenceState.WAITING for each in self.in_engine)

    def served(self, sequence: Sequence) -> Served:
        delivery = HandoffResult(num_held_tokens=0) if self.delivery is None else self.delivery
        is_local = delivery.prefill_worker_id is None
        num_cached = self.prompt.num_cached_tokens if is_local else delivery.num_cached_tokens
        return Served(
            num_cached_tokens=min(num_cached, self.prompt.num_prompt_tokens),
            prefill_worker_id=delivery.prefill_worker_id,
            num_pushed_tokens=delivery.num_pushed_tokens,
            partial_pushes=delivery.partial_pushes,
            num_preemptions=sequence.num_preemptions,
            numerics=self.numerics,
            phases=self.times.phases(
                0 if sequence.grammar is None else sequence.grammar.num_late_masks
            ),
        )


def sequences_of(
    placement_id: bytes,
    request: Request,
    *,
    card: ModelCard,
    eos_token_ids: frozenset[int],
    check_fits: Callable[[int], None],
) -> tuple[Sequence, dict[int, Sequence]]:
    """Returns the sequence of the prompt, and the choices by index. The first choice serves as the
    prompt if nothing is shared: the request has one choice, or the prompt is one token.

    Raises InvalidRequest for a request that cannot be run, and what `check_fits` raises for its
    number of tokens.
    """
    _check_choices(request)
    _check_sent(request.sampling, len(request.prompt_token_ids) // TOKEN_ID_BYTES)
    _check_retained(request)
    _check_sizes(request, card, check_fits)
    prompt = unpack_token_ids(request.prompt_token_ids)
    if not prompt:
        raise InvalidRequest("the prompt has no tokens", param="messages")
    first = _choice_of(placement_id, request, request.choices[0], prompt, eos_token_ids)
    choices = {first.choice_index: first}
    stripped = _without_prompt_logprobs(request)
    for choice in request.choices[1:]:
        other = _choice_of(placement_id, stripped, choice, prompt, eos_token_ids)
        choices[choice.choice_index] = other
    if len(choices) == 1 or len(prompt) == 1:
        return first, choices
    return _shared_prompt(placement_id, request, prompt, card.block_size), choices


def placement_id_of(sequence: Sequence) -> bytes:
    return sequence.sequence_id[:-CHOICE_ID_BYTES]


def _check_choices(request: Request) -> None:
    choices = request.choices
    indices = {choice.choice_index for choice in choices}
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequest(f"{len(choices)} choices, expected 1 to {MAX_CHOICES}", param="n")
    if len(indices) < len(choices):
        raise InvalidRequest("two choices have the same choice_index", param="n")
    if request.pooling is not None and len(choices) > 1:
        raise InvalidRequest(f"{len(choices)} choices of an embedding, expected 1", param="n")


def _check_sizes(request: Request, card: ModelCard, check_fits: Callable[[int], None]) -> None:
    """Checks sizes before unpacking, as every choice contains the prompt."""
    num_prompt = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    longest = max(len(choice.output_token_ids) // TOKEN_ID_BYTES for choice in request.choices)
    check_fits(num_prompt + longest)
    num_hashes = len(request.block_hashes) // BLOCK_HASH_BYTES
    if num_hashes > num_prompt // card.block_size:
        raise InvalidRequest(
            f"{num_hashes} block hashes for {num_prompt // card.block_size} full blocks"
        )


def _check_sent(sampling: SamplingParams, num_prompt_tokens: int) -> None:
    if sampling.num_prompt_logprobs is None:
        return
    num_values = num_prompt_tokens * (1 + sampling.num_prompt_logprobs)
    if num_values > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"logprobs of this prompt are {num_values} values, more than {MAX_PROMPT_LOGPROBS}",
            param="prompt_logprobs",
        )


def _check_retained(request: Request) -> None:
    """Checks the size of all logprobs, which the worker retains until the gateway
    acknowledges the end.
    """
    num_bytes = packed_bytes(request.sampling, len(request.choices))
    if num_bytes > MAX_LOGPROB_BYTES:
        raise InvalidRequest(
            f"logprobs of this request take {num_bytes} bytes, more than {MAX_LOGPROB_BYTES}",
            param="logprobs",
        )


def _without_prompt_logprobs(request: Request) -> Request:
    sampling = msgspec.structs.replace(request.sampling, num_prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=sampling)


def _choice_of(
    placement_id: bytes,
    request: Request,
    choice: Choice,
    prompt: list[int],
    eos_token_ids: frozenset[int],
) -> Sequence:
    sampling = request.sampling
    stop_token_ids = frozenset(sampling.stop_token_ids)
    return build_sequence(
        request,
        prompt + unpack_token_ids(choice.output_token_ids),
        sequence_id=placement_id + choice.choice_index.to_bytes(CHOICE_ID_BYTES, "big"),
        num_prompt_tokens=len(prompt),
        sampling=sampling if request.pooling is None else None,
        pooling=request.pooling,
        choice_index=choice.choice_index,
        kv_quota_tokens=request.kv_quota_tokens,
        stop_token_ids=stop_token_ids if sampling.ignore_eos else stop_token_ids | eos_token_ids,
    )


def _shared_prompt(
    placement_id: bytes, request: Request, prompt: list[int], block_size: int
) -> Sequence:
    *token_ids, last_token_id = prompt
    return build_sequence(
        request,
        token_ids,
        sequence_id=placement_id + _PROMPT_ID,
        num_blocks=len(token_ids) // block_size,
        kv_quota_tokens=request.kv_quota_tokens,
        num_prompt_logprobs=request.sampling.num_prompt_logprobs,
        next_token_id=last_token_id,
    )
