"""Every message on the wire, tagged and frozen.

Commands are imperative (`StartDecode`), events past tense (`BlocksStored`), data nouns
(`TokenBatch`). Token ids and hashes travel packed (`shared.packing`). Durations are seconds and
relative to the moment of sending; no message carries a point in time.

The life of a request, by message:

    gateway ──SubmitRequest──▶ scheduler      Queued, or a Failure with a retry time
    gateway ◀─QueueKeepalive── scheduler      while it waits; CancelQueued gives up
    scheduler ──MatchPrefix──▶ kv_index       PrefixMatches
    scheduler ──StartDecode──▶ decode         DecodeStarted, or a Failure: next worker, new id
    gateway ◀──Placed──────── scheduler       or PlacementFailed
    decode ────RunPrefill────▶ prefill        PrefillAccepted; RenewLease, AbortRequest
    decode ◀═══ KV frames ════ prefill        shared/kv_wire.py; PrefillFailed on NATS
    gateway ◀──TokenBatch──── decode          ResendTokens fills gaps
    gateway ──AckFinished────▶ decode         the ending arrived; or AbortRequest
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["gateway", "scheduler", "prefill", "decode", "kv_index"]
IndexState = Literal["exact", "degraded"]
ProcessState = Literal["starting", "ready", "draining", "stopped"]
FinishReason = Literal["stop", "length", "failed"]
# raw: of the model's own distribution; processed: of the one that tokens are drawn from, after
# bias, penalties, temperature and truncation
LogprobsMode = Literal["raw", "processed"]
Pooling = Literal["last", "mean"]
AbortReason = Literal["client_gone", "stop", "superseded", "fenced", "deadline", "failed"]


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of every wire message; the tag is the class name."""


class Failure(Message, frozen=True, kw_only=True):
    """An exception on the wire: `shared.errors` by code."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


# ── request ──────────────────────────────────────────────────────────────────────────────────────


class SamplingParams(Message, frozen=True, kw_only=True):
    """How tokens are drawn. Zero means zero: `temperature=0` is greedy, `top_k=0` is off."""

    seed: int  # u64, fixed by the gateway so that every try draws the same noise
    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0  # over prompt and output; 1 is off
    frequency_penalty: float = 0.0  # over the output, by count
    presence_penalty: float = 0.0  # over the output, once
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    num_logprobs: int | None = None  # None: none; 0: of the drawn token; k: and of the k likeliest
    num_prompt_logprobs: int | None = None  # the same, for every prompt token but the first
    logprobs_mode: LogprobsMode = "raw"


class Choice(Message, frozen=True, kw_only=True):
    """One unfinished choice; `output_token_ids` are what the gateway received so far."""

    choice_index: int
    output_token_ids: bytes = b""


class Request(Message, frozen=True, kw_only=True):
    """All that a worker needs to run a request from wherever it stands."""

    request_id: str
    tenant_id: str
    gateway_id: str
    model: str
    revision: str
    cache_root: bytes  # where this tenant's block hashes chain from
    prompt_token_ids: bytes
    block_hashes: bytes  # of the prompt's full blocks
    sampling: SamplingParams
    choices: tuple[Choice, ...]
    deadline_s: float
    priority: int = 0
    pooling: Pooling | None = None  # an embedding is asked for, and no token is drawn


class SubmitRequest(Message, frozen=True, kw_only=True):
    request: Request
    attempt: int = 0
    excluded_workers: tuple[str, ...] = ()
    affinity_key: str = ""


class Queued(Message, frozen=True, kw_only=True):
    scheduler_id: str
    num_ahead: int


class QueueKeepalive(Message, frozen=True, kw_only=True):
    scheduler_id: str
    request_ids: tuple[str, ...]


class CancelQueued(Message, frozen=True, kw_only=True):
    request_id: str


class Placed(Message, frozen=True, kw_only=True):
    request_id: str
    placement_id: bytes
    worker_id: str


class PlacementFailed(Message, frozen=True, kw_only=True):
    request_id: str
    failure: Failure


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


class StartDecode(Message, frozen=True, kw_only=True):
    """`prefill_candidates` are worker ids, best first; none means local prefill."""

    placement_id: bytes
    request: Request
    prefill_candidates: tuple[str, ...] = ()


class DecodeStarted(Message, frozen=True, kw_only=True):
    placement_id: bytes
    num_cached_tokens: int


class Served(Message, frozen=True, kw_only=True):
    """Who did the work and what it took, for usage and for people."""

    num_cached_tokens: int  # prompt tokens whose KV nobody had to compute
    prefill_worker_id: str | None  # None: the decode worker computed the prompt itself
    num_pushed_tokens: int = 0  # KV that came over the data plane
    num_preemptions: int = 0


class Finish(Message, frozen=True, kw_only=True):
    reason: FinishReason
    served: Served
    stop_token_id: int | None = None
    failure: Failure | None = None
    embedding: bytes | None = None  # [hidden_size] FP32, not normalised


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms of probabilities at one position; the likeliest come by falling order."""

    logprob: float  # of the token that stands there
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class TokenEntry(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one choice. `first_position` counts output tokens over all tries of the request.

    `served` and `prompt_logprobs` come with a placement's first tokens: a stop string can end it
    before its `finish`.
    """

    placement_id: bytes
    choice_index: int
    first_position: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    served: Served | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, if asked for
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's second token onwards


class TokenBatch(Message, frozen=True, kw_only=True):
    """What one engine step made for one gateway."""

    worker_id: str
    entries: tuple[TokenEntry, ...]


class ResendTokens(Message, frozen=True, kw_only=True):
    """Answered by a TokenBatch, or by `unknown_placement` if the worker no longer holds it."""

    placement_id: bytes
    choice_index: int
    from_position: int


class AckFinished(Message, frozen=True, kw_only=True):
    placement_ids: tuple[bytes, ...]


class AbortRequest(Message, frozen=True, kw_only=True):
    """`choice_index`: only this choice is unwanted (it met a stop string), the others go on."""

    placement_id: bytes
    reason: AbortReason
    choice_index: int | None = None


class Done(Message, frozen=True, kw_only=True):
    """The reply to a command that has nothing else to say."""


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


class DataPlaneAddress(Message, frozen=True, kw_only=True):
    """Where a decode worker takes KV. A peer that can open `unix_path` shares its host."""

    host: str
    port: int
    unix_path: str
    instance_id: bytes  # drawn at start; the handshake refuses a port that changed hands


class RunPrefill(Message, frozen=True, kw_only=True):
    """Compute the KV of `token_ids` (all but the last) and push [first_token, len) to decode."""

    placement_id: bytes
    tenant_id: str
    decode_worker_id: str
    model: str
    revision: str
    kv_format: str
    cache_root: bytes
    token_ids: bytes
    block_hashes: bytes
    first_token: int  # decode already holds the KV before it; a whole number of blocks
    target: DataPlaneAddress
    lease_s: float
    deadline_s: float


class PrefillAccepted(Message, frozen=True, kw_only=True):
    placement_id: bytes


class RenewLease(Message, frozen=True, kw_only=True):
    decode_worker_id: str
    placement_ids: tuple[bytes, ...]
    lease_s: float


class PrefillFailed(Message, frozen=True, kw_only=True):
    placement_id: bytes
    prefill_worker_id: str
    failure: Failure


# ── prefix index ─────────────────────────────────────────────────────────────────────────────────


class BlocksStored(Message, frozen=True, kw_only=True):
    """A run of full blocks, each the child of the one before, is now in a worker's cache."""

    tenant_id: str
    parent_hash: bytes
    first_block_index: int
    block_hashes: bytes


class BlocksRemoved(Message, frozen=True, kw_only=True):
    block_hashes: bytes


class BlocksCleared(Message, frozen=True, kw_only=True):
    pass


class KvEvents(Message, frozen=True, kw_only=True):
    """One worker's cache changes; `sequence_number` grows by one, a restart changes `epoch`."""

    worker_id: str
    epoch: int
    sequence_number: int
    model: str
    revision: str
    kv_format: str
    events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]


class ListBlocks(Message, frozen=True, kw_only=True):
    """Resync: asks a worker for all that it holds, page by page."""

    cursor: int = 0


class BlockPage(Message, frozen=True, kw_only=True):
    """`sequence_number` is that of the last event included in this page's state."""

    worker_id: str
    epoch: int
    sequence_number: int
    model: str
    revision: str
    kv_format: str
    stored: tuple[BlocksStored, ...]
    next_cursor: int | None = None


class MatchPrefix(Message, frozen=True, kw_only=True):
    tenant_id: str
    model: str
    revision: str
    block_hashes: bytes


class PrefixMatch(Message, frozen=True, kw_only=True):
    worker_id: str
    num_blocks: int


class PrefixMatches(Message, frozen=True, kw_only=True):
    state: IndexState
    matches: tuple[PrefixMatch, ...]


# ── health ───────────────────────────────────────────────────────────────────────────────────────


class ReportAlive(Message, frozen=True, kw_only=True):
    """Asked of who is late; answered by Done. If nobody answers to its name, it is gone."""


class ModelCard(Message, frozen=True, kw_only=True):
    """What a worker serves. `revision` is the digest of its weights."""

    name: str
    revision: str
    kv_format: str
    block_size: int
    max_context_tokens: int
    vocab_size: int


class WorkerLoad(Message, frozen=True, kw_only=True):
    """Where the engine stands. A token in flight is one whose KV a running request still needs."""

    step: int  # ticks when idle, too
    step_budget_s: float  # how long the step under way may take before it is suspect
    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0  # cached blocks that nobody references count as free
    num_total_blocks: int = 0
    num_reserved_blocks: int = 0
    prefill_tokens_in_flight: int = 0
    decode_tokens_in_flight: int = 0
    # since the process started: differences between heartbeats give speeds
    num_generated_tokens: int = 0
    num_computed_prompt_tokens: int = 0
    num_prompt_tokens: int = 0  # of admitted sequences, with output that an earlier try drew
    num_cached_prompt_tokens: int = 0  # of those, found in this worker's cache


class Heartbeat(Message, frozen=True, kw_only=True):
    """Sent every `interval_s` from the loop that does the work: progress, not a ping."""

    process_id: str
    epoch: int  # drawn at start
    sequence_number: int
    roles: tuple[Role, ...]
    state: ProcessState
    interval_s: float
    region: str = ""
    load: WorkerLoad | None = None
    model: ModelCard | None = None
    data_plane: DataPlaneAddress | None = None
