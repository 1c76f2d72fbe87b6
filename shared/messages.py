"""Every message on the wire, tagged and frozen.

Commands are imperative (`StartDecode`), events past tense (`BlocksStored`), data nouns
(`TokenBatch`). Token ids and hashes travel packed (`shared.packing`). Durations are seconds and
relative to the time of sending; no message carries a timestamp. A field's type states its valid
values: a message with an invalid value is rejected when it is decoded, before any handler runs.

The life of a request, by message:

    gateway ──SubmitRequest──▶ scheduler      Queued, or a Failure with a retry time
    gateway ◀─QueueKeepalive── scheduler      while it is queued; CancelQueued cancels it
    scheduler ──MatchPrefix──▶ kv_index       PrefixMatches
    scheduler ──StartDecode──▶ decode         DecodeStarted, or a Failure: next worker, new id
    gateway ◀──Placed──────── scheduler       or PlacementFailed
    decode ────RunPrefill────▶ prefill        PrefillAccepted; RenewLease, AbortRequest
    decode ◀═══ KV frames ════ prefill        shared/kv_wire/; PrefillFailed, PrefillPhases on NATS
    prefill ───FetchPixels───▶ gateway        where an image has to be encoded; decode does the same
    prefill ◀══ pixel frames ═ gateway        shared/pixels/
    prefill ───EncodeImage───▶ encode         where there are encode workers, which then fetch the
    prefill ◀══ vector frames═ encode         pixels; RenewLease, AbortRequest, EncodeFailed
    gateway ◀──TokenBatch──── decode          ResendTokens fills gaps
    gateway ──AckFinished────▶ decode         the last tokens arrived; or AbortRequest

Between sites, where a gateway serves as a decode worker for the other site:

    scheduler ──StartDecode──▶ gateway of the other site, which submits the request there
    gateway ◀──TokenBatch──── gateway of the other site; ResendTokens, AckFinished, AbortRequest
    decode ────RunPrefill────▶ gateway of the other site, for its prefill workers; RenewLease
    decode ◀═══ KV frames ════ prefill worker of the other site
    decode ◀─PrefillPhases─── gateway of the other site; PrefillFailed
    gateway ───SiteState─────▶ gateways and schedulers of every linked site; ReadSiteModels
    gateway ──ReadTenantCopies─▶ gateway of the tenants' home site; LeaseLimits, ReportUsage
    gateway ──WithdrawTenant──▶ gateway of a site that a tenant of this one has left
    gateway ───PrefixDigest──▶ schedulers of one linked site, about the requests of that site

The life of a model on a host:

    scheduler ──WakeModel────▶ host           ModelWaking, or a Failure; also ParkModel
    host ──ParkWorker────────▶ worker         Done in standby; WakeWorker, ResizeKv, ChangeRoles
    operator ──DrainWorker───▶ worker         DrainState
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from shared.grammar.spec import GrammarSpec
from shared.grammar.thinking import ThinkingBudget
from shared.kv_layout import MAX_GROUPS, KvShard, Reach
from shared.numerics import Numerics
from shared.packing import BLOCK_HASH_BYTES
from shared.telemetry.timeline import Timeline

Role = Literal["gateway", "scheduler", "encode", "prefill", "decode", "kv_index", "host"]
WorkerRole = Literal["prefill", "decode"]
# Roles by the name that operators use.
WORKER_ROLES: dict[str, tuple[WorkerRole, ...]] = {
    "prefill": ("prefill",),
    "decode": ("decode",),
    "both": ("prefill", "decode"),
}
IndexState = Literal["exact", "degraded"]
# standby: a worker without a KV cache, whose weights and kernels are ready
ProcessState = Literal["starting", "ready", "standby", "draining", "stopped"]
# State of a model on a host. hot: its worker serves. standby: its worker keeps only the weights.
# cold: no process. The others are on their way: starting and waking to hot, parking to standby,
# stopping to cold. failed: its last start failed, and `failure` says why.
ModelState = Literal[
    "cold", "starting", "standby", "waking", "hot", "parking", "stopping", "failed"
]
FinishReason = Literal["stop", "length", "failed"]
# raw: of the model's distribution; processed: of the sampling distribution, after bias, penalties,
# temperature and truncation
LogprobsMode = Literal["raw", "processed"]
Pooling = Literal["last", "mean"]
AbortReason = Literal["client_gone", "stop", "superseded", "fenced", "deadline", "failed"]

# Security of KV over TCP: aead encrypts and authenticates, mac only authenticates.
LinkSecurity = Literal["aead", "mac"]

PLACEMENT_ID_BYTES = 16
LINK_KEY_ID_BYTES = 16
LINK_KEY_BYTES = 32
RANK_KEY_BYTES = 32
MAX_DURATION_S = 31 * 86_400.0
MAX_CONTEXT_TOKENS = 2**31 - 1
MAX_WEIGHT = 1000.0
MAX_KV_TARGETS = 1024
MAX_LINKS = 64  # of a heartbeat
MAX_REFUSALS = 64  # kinds, of a heartbeat
MAX_COPIES = 256  # tenants of one site that another one may serve
MAX_USAGE_OF = 64  # removed tenants of one name
MAX_SENT_COPIES = 32  # in one reply
MAX_ASKED = 64  # requests for which one step asks
MAX_COPY_BYTES = 32 * 1024
MAX_DROPPED_TENANTS = 1000  # in one command
FINGERPRINT_BYTES = 4
MAX_DIGEST_FINGERPRINTS = 8192
MAX_IMAGES = 64  # of one request

PlacementId = Annotated[bytes, Meta(min_length=PLACEMENT_ID_BYTES, max_length=PLACEMENT_ID_BYTES)]
Digest = Annotated[bytes, Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
InstanceId = Annotated[bytes, Meta(min_length=1, max_length=64)]
# `{credential}`, or `{credential}.{instance}`: one or two tokens of a subject.
_TOKEN = r"[^\s.*>\x00-\x1f\x7f]+"
ProcessId = Annotated[str, Meta(max_length=256, pattern=rf"\A{_TOKEN}(\.{_TOKEN})?\Z")]
Name = Annotated[str, Meta(max_length=256)]
Fingerprints = Annotated[bytes, Meta(max_length=FINGERPRINT_BYTES * MAX_DIGEST_FINGERPRINTS)]
# Features of a worker, each with a version, such as `grammar/1`; compared as plain strings.
FeatureNames = Annotated[tuple[Name, ...], Meta(max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
GroupId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
NumEngines = Annotated[int, Meta(ge=1, le=2**20)]
Epoch = Annotated[int, Meta(ge=0)]  # random, of each start of a process
ChoiceIndex = Annotated[int, Meta(ge=0, le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]
# W3C Trace Context without its version: trace id, parent span id, flags
Traceparent = Annotated[bytes, Meta(min_length=25, max_length=25)]
BlockSize = Annotated[int, Meta(ge=1, le=2**20)]  # tokens
NumTokens = Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]
TileCount = Annotated[int, Meta(ge=0, le=256)]
PixelCount = Annotated[int, Meta(ge=1, le=2**20)]  # along one dimension
Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]  # seconds; NaN is invalid
NumRanks = Annotated[int, Meta(ge=1, le=1024)]
Ratio = Annotated[float, Meta(ge=0, le=1e6)]
TotalSeconds = Annotated[float, Meta(ge=0, le=1e12)]  # summed since the process started
PeakRate = Annotated[float, Meta(gt=0, le=1e30)]
TotalWork = Annotated[float, Meta(ge=0, le=1e30)]  # beyond the integers of the wire within days


class Message(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base of every wire message. The tag is the class name."""

    @property
    def sender_id(self) -> str | None:
        """The process that the message names as its sender, or None if it names none.

        The bus rejects the message from any other process.
        """
        return None

    @property
    def region_class(self) -> str:
        """The region class of the tenant whose data it has; "" for none. Its subject names it."""
        return ""


class Failure(Message, frozen=True, kw_only=True):
    """An exception on the wire; `code` identifies its class in `shared.errors`."""

    code: Name
    message: str
    param: str | None = None
    retry_after_s: Duration | None = None


# ── request ──────────────────────────────────────────────────────────────────────────────────────


class SamplingParams(Message, frozen=True, kw_only=True):
    """Parameters of sampling. `temperature=0` is greedy; `top_k=0` disables top-k."""

    seed: int  # u64, fixed by the gateway so that every attempt draws the same noise
    max_tokens: Annotated[int, Meta(le=MAX_CONTEXT_TOKENS)]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0  # covers prompt and output; 1 is off
    frequency_penalty: float = 0.0  # covers the output, by count
    presence_penalty: float = 0.0  # covers the output, once
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, value added to its logit
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that are never completed
    num_logprobs: int | None = None  # None: none; 0: the sampled token's; k: the top k's, too
    num_prompt_logprobs: int | None = None  # likewise, for every prompt token but the first
    logprobs_mode: LogprobsMode = "raw"
    grammar: GrammarSpec | None = None  # the output must match it; its `Request` needs grammar/1
    thinking: ThinkingBudget | None = None  # its `Request` needs thinking_budget/1

    @property
    def is_penalized(self) -> bool:
        """Whether sampling depends on the tokens so far."""
        return self.repetition_penalty != 1 or bool(self.frequency_penalty or self.presence_penalty)


class ImagePart(Message, frozen=True, kw_only=True):
    """The tokens of one image, from its first image token to its last one. Tokens between them may
    be other ones, such as those that separate tiles.

    `image_hash` covers the processed pixels, the grid, the processor's configuration and the
    encoder's weights. `grid` has rows and columns. Of most families it counts tiles, or is (0, 0)
    if the image is not split, and the complete image follows as one more tile; of Kimi K2.5 it
    counts the image's tokens.
    """

    first_token: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)]
    num_tokens: NumTokens
    image_hash: Digest
    grid: tuple[TileCount, TileCount]


ImageParts = Annotated[tuple[ImagePart, ...], Meta(max_length=MAX_IMAGES)]


class Choice(Message, frozen=True, kw_only=True):
    """One unfinished choice. `output_token_ids` are the tokens that the gateway has received."""

    choice_index: ChoiceIndex
    output_token_ids: bytes = b""


class Request(Message, frozen=True, kw_only=True):
    """Everything that a worker needs to start a request or to resume it after some output."""

    request_id: Name
    tenant_id: Name
    gateway_id: ProcessId
    model: Name
    revision: Name
    cache_root: Digest  # parent of the first block hash of this tenant
    prompt_token_ids: bytes
    block_hashes: bytes  # hashes of the prompt's full blocks
    num_public_blocks: Count = 0  # how many of these are a public prefix, shared by all tenants
    sampling: SamplingParams
    choices: tuple[Choice, ...]
    deadline_s: Duration
    priority: int = 0
    weight: Annotated[float, Meta(gt=0, le=MAX_WEIGHT)] = 1.0  # share of the queue for its tenant
    allowed_regions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()  # empty: all
    kv_quota_tokens: Count = 0  # tokens of one worker's cache, for the whole tenant; 0: unlimited
    is_zero_retention: bool = False  # no data of it is retained after its end
    pooling: Pooling | None = None  # an embedding is requested, and no token is sampled
    # Tokens of a block in `block_hashes`; the default is that of workers on CPUs
    block_size: BlockSize = 16
    public_root: Digest | None = None  # parent of the first public block, if there is any
    # Numerics of the worker that generated the output so far, if any
    numerics: Numerics | None = None
    needs: FeatureNames = ()  # every worker that decodes or prefills it has these
    traceparent: Traceparent | None = None  # the gateway's span; None: not traced
    origin_site: Name = ""  # the site that it came from over a link; it is not sent on to another
    region_class: Name = ""  # that of its tenant, which its subjects name; empty: none
    images: ImageParts = ()  # in the order of the prompt; `gateway_id` holds their pixels

    @property
    def queue_id(self) -> str:
        """Whose share of a queue it uses: its tenant's, or that of all requests of its site."""
        return f"{self.origin_site}/" if self.origin_site else self.tenant_id


class SubmitRequest(Message, frozen=True, kw_only=True):
    request: Request
    attempt: Count = 0
    excluded_workers: Annotated[tuple[ProcessId, ...], Meta(max_length=1024)] = ()
    affinity_key: Name = ""
    is_queueable: bool = True  # False: rejected instead of waiting for room on a worker
    # Its worker has no room for it: placed now, with room to grow, or rejected and goes on there
    is_move: bool = False

    @property
    def sender_id(self) -> str:
        return self.request.gateway_id

    @property
    def region_class(self) -> str:
        return self.request.region_class

    @property
    def traceparent(self) -> bytes | None:
        return self.request.traceparent


class Queued(Message, frozen=True, kw_only=True):
    scheduler_id: ProcessId
    num_ahead: Count

    @property
    def sender_id(self) -> str:
        return self.scheduler_id


class QueueKeepalive(Message, frozen=True, kw_only=True):
    scheduler_id: ProcessId
    request_ids: tuple[Name, ...]

    @property
    def sender_id(self) -> str:
        return self.scheduler_id


class CancelQueued(Message, frozen=True, kw_only=True):
    """Cancels the gateway's attempts up to `attempt`, or all if None.

    It may arrive after a later attempt.
    """

    request_id: Name
    gateway_id: ProcessId
    attempt: Count | None = None

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class Placed(Message, frozen=True, kw_only=True):
    request_id: Name
    placement_id: PlacementId
    worker_id: ProcessId
    # live prefill workers may not share KV with this one, which therefore computes the prompt
    has_unlike_prefill: bool = False
    # The request's features, as its scheduler knows them: an older one drops them
    needs: FeatureNames = ()
    queued_s: Duration = 0.0  # time at the scheduler, until it chose a worker
    placement_s: Duration = 0.0  # time from the choice to the worker's reply
    scheduler_id: ProcessId | None = None
    attempt: Count = 0  # of the submission; 0: an older scheduler does not say


class PlacementFailed(Message, frozen=True, kw_only=True):
    request_id: Name
    scheduler_id: ProcessId
    attempt: Count
    failure: Failure

    @property
    def sender_id(self) -> str:
        return self.scheduler_id


# ── decode ───────────────────────────────────────────────────────────────────────────────────────


class StartDecode(Message, frozen=True, kw_only=True):
    """Starts a request on a decode worker. `prefill_candidates` are worker ids, best first; none
    means local prefill.
    """

    placement_id: PlacementId
    request: Request
    prefill_candidates: Annotated[tuple[ProcessId, ...], Meta(max_length=16)] = ()
    # Of the candidates at other sites, whose heartbeats a worker does not receive: their regions
    candidate_regions: Annotated[tuple[tuple[ProcessId, Name], ...], Meta(max_length=16)] = ()
    is_queueable: bool = True  # for another site: as of SubmitRequest

    @property
    def region_class(self) -> str:
        return self.request.region_class

    @property
    def traceparent(self) -> bytes | None:
        return self.request.traceparent


class DecodeStarted(Message, frozen=True, kw_only=True):
    placement_id: PlacementId
    num_cached_tokens: Count


class PrefillPhases(Message, frozen=True, kw_only=True):
    """Times of a prefill for another worker, sent to that worker after its KV."""

    placement_id: PlacementId
    prefill_worker_id: ProcessId
    queued_s: Duration = 0.0  # time from the command to its first step
    compute_s: Duration = 0.0  # then to the last step
    push_s: Duration = 0.0  # then to the last byte of KV that was sent
    num_pushed_bytes: Count = 0
    link_s: Duration = 0.0  # with at least one of its frames under way; 0: not measured
    # Of the link that it went over, predicted before its first frame: shared/kv_wire/ports. Empty
    # and 0: nothing was pushed, or ranks pushed it
    port: Name = ""
    place: Name = ""
    num_copies: Count = 0
    predicted_s: Duration = 0.0

    @property
    def sender_id(self) -> str:
        return self.prefill_worker_id


class DecodePhases(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a placement. Its first tokens have those known by then, its `Finish` has all.
    `reserve_s + prefill_wait_s + first_step_s` is the time from the command to the first token.
    """

    reserve_s: Duration = 0.0  # time from the command to blocks and, if remote, an accepted prefill
    prefill_wait_s: Duration = 0.0  # then to complete KV; 0: computed here
    first_step_s: Duration = 0.0  # then to the first token
    decode_s: Duration = 0.0  # then to the last token
    num_steps: Count = 0
    num_late_masks: Count = 0
    prefill: PrefillPhases | None = None  # None: computed here, or not yet known


class KvPush(msgspec.Struct, frozen=True, array_like=True):
    """Tokens whose KV a prefill worker pushed, of a prompt that it did not complete."""

    worker_id: ProcessId
    num_tokens: Count


class Served(Message, frozen=True, kw_only=True):
    """The worker that did the prefill, and the cost of the request, for usage records and
    operators.
    """

    num_cached_tokens: Count  # prompt tokens whose KV did not have to be computed
    prefill_worker_id: ProcessId | None  # None: the decode worker computed the prompt
    num_pushed_tokens: Count = 0  # tokens whose KV arrived over the data plane
    # those of them that came from workers which failed before the prompt was complete
    partial_pushes: Annotated[tuple[KvPush, ...], Meta(max_length=16)] = ()
    num_preemptions: Count = 0
    numerics: Numerics | None = None  # the decode worker's
    phases: DecodePhases | None = None


class Finish(Message, frozen=True, kw_only=True):
    reason: FinishReason
    served: Served
    stop_token_id: int | None = None
    failure: Failure | None = None
    embedding: bytes | None = None  # [hidden_size] FP32, not normalised


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural logarithms of probabilities at one position, in FP32; the top ones in descending
    order.
    """

    logprob: float  # logprob of the token at this position
    top_token_ids: tuple[TokenId, ...] = ()
    top_logprobs: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.top_token_ids) != len(self.top_logprobs):
            raise ValueError("top_token_ids and top_logprobs differ in length")


class TokenEntry(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one choice. `first_position` counts output tokens over all attempts of the request.

    `served` and `prompt_logprobs` are sent with a placement's first tokens, because a stop string
    can end it before its `finish`.
    """

    placement_id: PlacementId
    choice_index: ChoiceIndex
    first_position: Count
    token_ids: tuple[TokenId, ...]
    finish: Finish | None = None
    served: Served | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each of `token_ids`, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # one for each prompt token from the second
    is_waiting: bool = False  # nothing of the placement is computed now: it waits for room


class TokenBatch(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens that one engine step, or a few short ones, generated for one gateway."""

    worker_id: ProcessId
    entries: tuple[TokenEntry, ...]
    region_class: Name = ""  # that of the tenant

    @property
    def sender_id(self) -> str:
        return self.worker_id


class ResendTokens(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The reply is a TokenBatch, or `unknown_placement` if the worker no longer holds it."""

    placement_id: PlacementId
    choice_index: ChoiceIndex
    from_position: Count
    region_class: Name = ""  # that of the tenant


class AckFinished(Message, frozen=True, kw_only=True):
    placement_ids: tuple[PlacementId, ...]


class ReadTimeline(Message, frozen=True, kw_only=True):
    """Asks a gateway for a timeline. Observers send it."""

    request_id: Name


class TimelineRead(Message, frozen=True, kw_only=True):
    timeline: Timeline | None = None  # None: unknown here, or forgotten


class AbortRequest(Message, frozen=True, kw_only=True):
    """Aborts a placement, or only the choice `choice_index`, which reached a stop string."""

    placement_id: PlacementId
    reason: AbortReason
    choice_index: ChoiceIndex | None = None


class Done(Message, frozen=True, kw_only=True):
    """The empty reply: the command succeeded."""


# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


class DataPlaneAddress(Message, frozen=True, kw_only=True):
    """The address at which a decode worker receives KV. A peer that can open `unix_path` is on the
    same host.
    """

    host: Name
    port: Annotated[int, Meta(ge=0, le=65535)]
    unix_path: Annotated[str, Meta(max_length=4096)]
    instance_id: InstanceId  # random at each start; the handshake rejects a port that was reused


class KvTarget(Message, frozen=True, kw_only=True):
    """The part of the KV that one process of a decode worker receives: `shard` counts the layers of
    the model.
    """

    shard: KvShard
    address: DataPlaneAddress


# One for a worker of one process, else one for each rank; ranks that hold the same heads each
# receive them.
KvTargets = Annotated[tuple[KvTarget, ...], Meta(max_length=MAX_KV_TARGETS)]


class LinkKey(Message, frozen=True, kw_only=True):
    """A key that seals KV over TCP between one prefill and one decode worker, which generates
    it.
    """

    key_id: Annotated[bytes, Meta(min_length=LINK_KEY_ID_BYTES, max_length=LINK_KEY_ID_BYTES)]
    key: Annotated[bytes, Meta(min_length=LINK_KEY_BYTES, max_length=LINK_KEY_BYTES)]
    security: LinkSecurity

    def __repr__(self) -> str:
        """Returns a text without the key, as logs may contain it."""
        return f"LinkKey(key_id={self.key_id.hex()}, security={self.security})"


class RunPrefill(Message, frozen=True, kw_only=True):
    """Compute the KV of `token_ids` (all but the last) and push [first_token, len) to decode.

    Each rank of the prefill worker pushes what it shares with each of `targets`; one `link_key` is
    for all of them.
    """

    placement_id: PlacementId
    tenant_id: Name
    decode_worker_id: ProcessId
    model: Name
    revision: Name
    kv_format: Name
    cache_root: Digest
    token_ids: bytes
    block_hashes: bytes
    num_public_blocks: Count = 0
    first_token: Count  # decode already holds the KV before it; a multiple of the block size
    kv_quota_tokens: Count = 0  # copied from the request
    is_zero_retention: bool = False  # copied from the request
    targets: KvTargets
    lease_s: Duration
    deadline_s: Duration
    link_key: LinkKey | None = None  # None: KV over TCP is neither encrypted nor authenticated
    public_root: Digest | None = None  # copied from the request
    numerics: Numerics  # the decode worker's
    request_id: Name  # copied from the request: another try has another placement id
    needs: FeatureNames = ()  # copied from the request
    traceparent: Traceparent | None = None  # copied from the request
    images: ImageParts = ()  # those that begin within `token_ids`
    gateway_id: Name = ""  # holds the pixels of `images`
    allowed_regions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()  # likewise
    region_class: Name = ""  # likewise
    target_region: Name = ""  # the decode worker's

    @property
    def sender_id(self) -> str:
        return self.decode_worker_id


class PrefillAccepted(Message, frozen=True, kw_only=True):
    placement_id: PlacementId


class RenewLease(Message, frozen=True, kw_only=True):
    decode_worker_id: ProcessId
    placement_ids: tuple[PlacementId, ...]
    lease_s: Duration

    @property
    def sender_id(self) -> str:
        return self.decode_worker_id


class PrefillFailed(Message, frozen=True, kw_only=True):
    placement_id: PlacementId
    prefill_worker_id: ProcessId
    failure: Failure

    @property
    def sender_id(self) -> str:
        return self.prefill_worker_id


# ── pixels ───────────────────────────────────────────────────────────────────────────────────────


class FetchPixels(Message, frozen=True, kw_only=True):
    """Asks the gateway of a request for the pixels of one of its images. The gateway pushes them to
    `target` as frames of `transfer_id`. The reply is Done, or InvalidRequest if it does not hold
    them. A `request_id` of `request_of_prefix` names a prefix, whose images any gateway reads.
    """

    worker_id: ProcessId
    tenant_id: Name
    request_id: Name
    image_hash: Digest
    shape: Annotated[tuple[PixelCount, ...], Meta(min_length=1, max_length=8)]  # uint8
    transfer_id: PlacementId
    target: DataPlaneAddress
    link_key: LinkKey | None = None  # None: pixels over TCP are not sealed
    deadline_s: Duration
    region_class: Name = ""  # that of the tenant

    @property
    def sender_id(self) -> str:
        return self.worker_id


# ── encode ───────────────────────────────────────────────────────────────────────────────────────


class EncodeImage(Message, frozen=True, kw_only=True):
    """Encode an image of a request, whose pixels its gateway holds, and push the vectors to
    `target` as frames of `transfer_id`. The reply is Done; EncodeFailed may follow.
    """

    transfer_id: PlacementId
    worker_id: ProcessId  # which wants the vectors
    encoder: Name  # EncoderCard.key of that worker's own encoder
    tenant_id: Name
    request_id: Name
    gateway_id: ProcessId
    cache_root: Digest
    image_hash: Digest
    grid: tuple[TileCount, TileCount]  # copied from the ImagePart: the shape of the pixels
    target: DataPlaneAddress
    link_key: LinkKey | None = None  # None: vectors over TCP are not sealed
    lease_s: Duration
    deadline_s: Duration
    is_zero_retention: bool = False  # copied from the request
    allowed_regions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()  # likewise
    region_class: Name = ""  # likewise

    @property
    def sender_id(self) -> str:
        return self.worker_id


class EncodeFailed(Message, frozen=True, kw_only=True):
    transfer_id: PlacementId
    worker_id: ProcessId  # that was to encode the image
    failure: Failure

    @property
    def sender_id(self) -> str:
        return self.worker_id


# ── prefix index ─────────────────────────────────────────────────────────────────────────────────


class BlocksStored(Message, frozen=True, kw_only=True):
    """A run of full blocks, each the child of the one before, is now in a worker's cache."""

    tenant_id: Name
    parent_hash: Digest
    first_block_index: Count
    block_hashes: bytes
    group: GroupId = 0  # group of layers


class BlocksRemoved(Message, frozen=True, kw_only=True):
    block_hashes: bytes
    group: GroupId = 0


class BlocksCleared(Message, frozen=True, kw_only=True):
    pass


class KvEvents(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of one worker's cache, of blocks of one region class or of none; `sequence_number`
    grows by 1 in each, a restart changes `epoch`.
    """

    worker_id: ProcessId
    epoch: Epoch
    sequence_number: Count
    model: Name
    revision: Name
    kv_format: Name
    events: tuple[BlocksStored | BlocksRemoved | BlocksCleared, ...]
    region_class: Name = ""  # that of the tenant

    @property
    def sender_id(self) -> str:
        return self.worker_id


class ListBlocks(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Resync: requests the list of all blocks that a worker holds of one region class, or of none,
    one page at a time.
    """

    cursor: Count = 0
    region_class: Name = ""  # that of the tenant


class BlockPage(Message, frozen=True, kw_only=True):
    """A page of a worker's blocks. `sequence_number` is that of the last event included in its
    state.
    """

    worker_id: ProcessId
    epoch: Epoch
    sequence_number: Count
    model: Name
    revision: Name
    kv_format: Name
    stored: tuple[BlocksStored, ...]
    next_cursor: Count | None = None

    @property
    def sender_id(self) -> str:
        return self.worker_id


class PinPrefix(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Pins the full blocks of a prefix: a worker evicts them only after all others, and computes
    the missing ones. The reply is PrefixPinned, or WorkerBusy if pins already fill their share of
    the cache.
    """

    tenant_id: Name
    model: Name
    revision: Name
    cache_root: Digest  # the root of the public prefix, if it is one
    public_root: Digest | None = None  # as of a request, if it starts with a public one
    token_ids: bytes
    block_hashes: bytes  # hashes of all the tokens
    num_public_blocks: Count = 0  # all of a public prefix
    lease_s: Duration  # starts when the worker receives it; KeepPins renews it
    allowed_regions: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()  # empty: all
    region_class: Name = ""  # as of a request
    # Images of the tokens, as of a request, and where their pixels are: see FetchPixels
    images: ImageParts = ()
    gateway_id: Name = ""
    request_id: Name = ""


class PrefixPinned(Message, frozen=True, kw_only=True):
    num_cached_blocks: Count
    is_computing: bool  # the missing blocks; a worker with waiting requests computes them later


class KeepPins(Message, frozen=True, kw_only=True, omit_defaults=True):
    """All prefixes of one region class, or of none, that are pinned on a worker, each by its last
    block hash; any other pin of it is released.
    """

    tip_hashes: bytes
    lease_s: Duration
    region_class: Name = ""  # that of the tenant


class PinsKept(Message, frozen=True, kw_only=True):
    missing_tip_hashes: bytes


class DropTenantKv(Message, frozen=True, kw_only=True):
    """Makes the KV of tenants unfindable on a worker; it is zeroed once nothing uses it. For
    `unretained_s` from then on their requests have zero retention there.
    """

    tenant_ids: Annotated[tuple[Name, ...], Meta(max_length=MAX_DROPPED_TENANTS)]
    unretained_s: Duration


class TenantKvDropped(Message, frozen=True, kw_only=True):
    """`num_blocks` were findable. Of `busy_tenant_ids` requests still run on the worker."""

    num_blocks: Count
    busy_tenant_ids: tuple[Name, ...] = ()


class CountTenantKv(Message, frozen=True, kw_only=True):
    tenant_id: Name


class TenantKvCounted(Message, frozen=True, kw_only=True):
    """Tokens whose KV a worker holds: findable ones, and those of requests that run."""

    num_cached_tokens: Count
    num_held_tokens: Count


class MatchPrefix(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Which workers hold leading blocks of a prompt? Of a tenant with a region class, the first
    `num_public_blocks` are looked up among the blocks without one.
    """

    tenant_id: Name
    model: Name
    revision: Name
    block_hashes: bytes
    is_counted: bool = True  # counts as a use of the matched blocks, in the records of prefixes
    region_class: Name = ""  # that of the tenant
    num_public_blocks: Count = 0


class PrefixMatch(Message, frozen=True, kw_only=True):
    worker_id: ProcessId
    num_blocks: Count


class PrefixMatches(Message, frozen=True, kw_only=True):
    state: IndexState
    matches: tuple[PrefixMatch, ...]


class IndexLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """State of an index. Exact: it matches the events of every worker."""

    state: IndexState
    num_blocks: Count = 0
    num_workers: Count = 0
    num_inexact_workers: Count = 0
    num_resyncs: Count = 0  # resyncs since its start
    num_matches: Count = 0
    num_pending_records: Count = 0  # changes of prefix records not yet written to Redis
    num_pinned_prefixes: Count = 0


# Upper bounds of the buckets of latencies, in seconds: ten a decade, from 1 ms to 100 s
LATENCY_BOUNDS_S = tuple(round(10 ** (power / 10 - 3), 6) for power in range(51))
# Number of values by bucket; the last bucket is open, and empty buckets at the end are left out
LatencyCounts = Annotated[tuple[Count, ...], Meta(max_length=len(LATENCY_BOUNDS_S) + 1)]


class SiteRequests(msgspec.Struct, frozen=True, array_like=True):
    """Requests of a tenant by the site and the region of their last worker; "": unknown."""

    site: Name
    tenant_id: Name
    num_requests: Count
    region: Name = ""


class GatewayLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Counts of a gateway since its start."""

    # prompts that decode computed because it may not use the KV of live prefill workers
    num_unlike_prefills: Count = 0
    # outputs that a worker with other numerics than before continued
    num_numerics_changes: Count = 0
    num_resubmissions: Count = 0
    num_lost_streams: Count = 0  # streams that failed after their first token
    num_refused_requests: Count = 0
    num_open_streams: Count = 0  # now
    num_requests: Count = 0  # requests that ended or were rejected
    num_failed_requests: Count = 0  # those with an error of the cluster, not of their client
    # requests that got an error instead of any output, by error code
    rejections: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=64)] = ()
    # resubmissions by the worker that had the request; those of the last workers
    moved_streams: Annotated[tuple[tuple[ProcessId, Count], ...], Meta(max_length=16)] = ()
    # requests by the site and region where they ended and their tenant: the most frequent ones
    site_requests: Annotated[tuple[SiteRequests, ...], Meta(max_length=64)] = ()
    ttft_counts: LatencyCounts = ()  # requests by time to first token
    itl_counts: LatencyCounts = ()  # tokens by time since the one before


class StoreLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A connection to Redis since the start of its process."""

    is_away: bool = False  # the last call got no reply: the breaker is open, or about to try again
    num_failures: Count = 0  # calls without a reply in time
    num_reconnects: Count = 0  # first replies after a failure
    rejects_writes: bool = False  # Redis has a full disk or memory, or is a replica


class RoleDemand(msgspec.Struct, frozen=True, kw_only=True):
    """One scheduler's measurements of a model and role. Queued requests wait for this role.

    Their prompts take `work_s` seconds of one worker. `num_workers` live ones have the role. The
    work of the whole fleet and of this queue asks for `num_wanted_workers`.
    """

    model: Name
    role: WorkerRole
    num_queued_requests: Count = 0
    num_queued_tokens: Count = 0
    work_s: TotalSeconds = 0.0
    num_workers: Count = 0
    num_wanted_workers: Count = 0


class SchedulerLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    num_queued_requests: Count = 0
    oldest_wait_s: Duration = 0.0
    demands: Annotated[tuple[RoleDemand, ...], Meta(max_length=128)] = ()


# ── health ───────────────────────────────────────────────────────────────────────────────────────


class ReportAlive(Message, frozen=True, kw_only=True):
    """Asks a process for a sign of life. Peers send it if its heartbeat is late; a process that
    starts sends it to its own name. With no responder, the process is gone, or the name is free.
    """


class Alive(Message, frozen=True, kw_only=True):
    epoch: Epoch
    host: Name
    uptime_s: TotalSeconds


class JoinRanks(Message, frozen=True, kw_only=True):
    """Offers to run ranks of a worker that is starting, on another host."""

    host: Name
    num_ranks: NumRanks


class RanksAssigned(Message, frozen=True, kw_only=True):
    """Ranks [first_rank, first_rank + num_ranks) of tp x pp are the host's, which opens its
    connections to this address with this key.
    """

    host: Name
    port: Annotated[int, Meta(ge=1, lt=65536)]
    key: Annotated[bytes, Meta(min_length=RANK_KEY_BYTES, max_length=RANK_KEY_BYTES)]
    first_rank: Annotated[int, Meta(ge=1, lt=1024)]
    num_ranks: NumRanks
    tp: NumRanks
    pp: NumRanks


class ModelCard(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The model that a worker serves. `revision` is the digest of its weights.

    `max_context_tokens` is the longest sequence that this worker computes: its KV cache may hold
    less than the model's context.
    """

    name: Name
    revision: Name
    kv_format: Name
    block_size: BlockSize
    max_context_tokens: NumTokens
    vocab_size: NumTokens
    kv_bytes_per_token: Count = 0
    kv_reaches: tuple[Reach, ...] = (None,)  # reaches of the groups of layers
    # The model's limit, whatever this worker's KV cache holds; None: not reported.
    model_context_tokens: NumTokens | None = None
    numerics: Numerics
    features: FeatureNames = ()  # features that requests may need of this worker
    step_launch: Name | msgspec.UnsetType = msgspec.UNSET  # a GPU's: see Executor


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class DeviceHealth(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What NVML says of a worker's GPU, counted since the process started."""

    num_xids: Count = 0  # errors that the driver reported, of any process on the GPU
    last_xid: Count = 0  # 0: none
    num_ecc_errors: Count = 0  # uncorrected
    throttles: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()  # why clocks are lower now
    row_remap: Name = ""  # pending: at the next reset; failed: the device has to be replaced
    unread_s: Duration = 0.0  # time since the last reading, if it is late
    fault: Name = ""  # why the worker leaves


class DevicePeaks(msgspec.Struct, frozen=True, kw_only=True):
    """The most that a device's memory moves, and that it computes, by its vendor's data sheet."""

    bytes_per_s: PeakRate
    operations_per_s: PeakRate


class SitePushes(msgspec.Struct, frozen=True, array_like=True):
    """KV that prefill workers of one site pushed to a decode worker of another, since its start:
    tokens, bytes before compression, and seconds with at least one frame of a push under way.
    """

    site: Name
    num_tokens: Count = 0
    num_bytes: Count = 0
    link_s: TotalSeconds = 0.0


class KvLinks(msgspec.Struct, frozen=True, array_like=True):
    """Open links to decode workers that push KV in the same way. `refused`: the port that was tried
    first and failed, or empty.
    """

    port: Name
    place: Name
    num_links: Count
    refused: Name = ""


class WorkerLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """State of an engine. A token in flight is one whose KV a running request still needs."""

    step: Count  # increases while idle, too
    step_budget_s: Duration  # how long the current step may take before the worker is suspect
    num_running: Count = 0
    num_waiting: Count = 0
    num_free_blocks: Count = 0  # cached blocks without references count as free
    num_total_blocks: Count = 0
    num_reserved_blocks: Count = 0
    prefill_tokens_in_flight: Count = 0
    decode_tokens_in_flight: Count = 0
    # Counters since the process started: differences between heartbeats give speeds.
    num_generated_tokens: Count = 0
    num_computed_prompt_tokens: Count = 0
    num_busy_steps: Count = 0  # steps that computed something, and their total time
    busy_s: TotalSeconds = 0.0
    num_preemptions: Count = 0
    num_failed_steps: Count = 0  # steps that raised, however many rows did
    num_failed_zeroings: Count = 0
    num_out_of_memory: Count = 0  # operations of the device that had too little, not failed ones
    # images since its start: encoded, and those that were encoded already when they were wanted
    num_encoded_images: Count = 0
    num_reused_images: Count = 0
    num_encoded_tiles: Count = 0
    encode_s: TotalSeconds = 0.0  # with a tile in the encoder
    num_fetched_images: Count = 0  # whose vectors came from another worker
    max_step_tokens: Count = 0  # of a step at most, since one had too little memory; 0: no change
    num_handoffs_in_flight: Count = 0  # now: a decode worker's prefills at other workers
    num_handoffs: Count = 0  # prefills handed to another worker, and the wait for its reply
    handoff_ack_s: TotalSeconds = 0.0
    num_pushed_tokens: Count = 0  # tokens whose KV this worker pushed, and the time of the frames
    push_s: TotalSeconds = 0.0
    saved_kv_bytes: Count = 0  # bytes not pushed because the KV was compressed
    kv_links: Annotated[tuple[KvLinks, ...], Meta(max_length=16)] = ()
    # Prompt tokens of admitted sequences, with the output of earlier attempts
    num_prompt_tokens: Count = 0
    num_cached_prompt_tokens: Count = 0  # those found in this worker's cache
    num_kv_events: Count = 0  # sequence number of its last KvEvents: reveals a lost last message
    # the same of each region class of which it has cached blocks since its start
    num_class_kv_events: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=16)] = ()
    # KV frames since the process started: accepted, and rejected by cause
    num_kv_frames: Count = 0
    num_corrupt_kv_frames: Count = 0
    num_unknown_kv_frames: Count = 0  # late, or for another worker
    num_refused_kv_frames: Count = 0  # duplicate, out of order, or of another format
    num_bad_kv_peers: Count = 0  # connections that violated the protocol, or ended within a frame
    # Counters of grammars since the process started.
    num_late_masks: Count = 0  # tokens that waited for a later step
    num_failed_grammars: Count = 0  # choices that ended, because theirs could not be followed
    num_abandoned_grammar_threads: Count = 0  # their job took too long
    # the busiest expert's tokens over the mean, in the worst layer, of the last minutes; 0: no
    # experts, or too few tokens
    expert_imbalance: Ratio = 0.0
    # commands and frames rejected because their KV has another format or other numerics
    num_kv_mismatches: Count = 0
    num_failed_handoffs: Count = 0  # attempts that another worker did not complete
    offloaded_bytes: Count = 0  # of weights of a parked worker, in memory of the host
    # steps that computed at most as many tokens as each of STEP_TOKENS; the last: more
    num_steps_by_tokens: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    device_health: DeviceHealth | None = None  # None: not a GPU, or not watched
    # Bytes that the busy steps moved from and to the device's memory, and their operations, counted
    # by the steps' shapes: see planning/step_work.py
    traffic_bytes: TotalWork = 0.0
    num_operations: TotalWork = 0.0
    peaks: DevicePeaks | None = None  # None: not known, as of CPUs
    num_engines: NumEngines = 1  # more: those of a site, as one worker
    site_pushes: Annotated[tuple[SitePushes, ...], Meta(max_length=1024)] = ()


# ── sites ────────────────────────────────────────────────────────────────────────────────────────


class SiteLoad(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The load of a site's workers for one model, in the fields of WorkerLoad. Without their names
    it takes a quarter of the bytes.
    """

    num_running: Count = 0
    num_waiting: Count = 0
    num_free_blocks: Count = 0
    num_total_blocks: Count = 0
    prefill_tokens_in_flight: Count = 0
    decode_tokens_in_flight: Count = 0
    num_engines: NumEngines = 1


class SiteCounters(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The counters of a site's mean worker for one model, in the fields of WorkerLoad."""

    num_generated_tokens: Count = 0
    num_computed_prompt_tokens: Count = 0
    num_busy_steps: Count = 0
    busy_s: TotalSeconds = 0.0


class SiteState(Message, frozen=True, array_like=True, kw_only=True):
    """What a gateway of one site takes over from the others, once a second and at once on a loss.

    `gateway_id` is `{site}/{gateway}`. The loads are those of the models that `models_id` stands
    for: a receiver that does not know it asks with ReadSiteModels, so that models, which change
    rarely, do not cross each link every second. Without a load it only shows that the gateway
    lives. Without counters they are those of the state before. A gateway that drains finishes what
    it has taken over, and takes no more. `instance` is equal in all states of one site, and another
    for a second site of its name. `doubled` names the sites that look like two from here.
    """

    gateway_id: ProcessId
    epoch: Epoch
    sequence_number: Count
    region: Name = ""
    models_id: Annotated[bytes, Meta(max_length=16)] = b""
    loads: Annotated[tuple[SiteLoad, ...], Meta(max_length=1024)] = ()
    counters: Annotated[tuple[SiteCounters, ...], Meta(max_length=1024)] = ()
    is_draining: bool = False
    instance: Annotated[bytes, Meta(max_length=16)] = b""
    doubled: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class SiteModel(msgspec.Struct, frozen=True, array_like=True):
    """One model at a site: the card of the workers that decode it, or that compute prompts of it
    for other sites and push the KV there.
    """

    card: ModelCard
    role: WorkerRole = "decode"


class ReadSiteModels(Message, frozen=True, kw_only=True):
    """Which models do your states report? The reply is SiteModels."""


class SiteModels(Message, frozen=True, kw_only=True):
    """The models that a gateway's states report, in their order."""

    gateway_id: ProcessId
    models_id: Annotated[bytes, Meta(max_length=16)]
    models: Annotated[tuple[SiteModel, ...], Meta(max_length=1024)]

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class LinkLoad(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A link to another site, as one process sees it. Counts are since the start of the process;
    bytes are those of its own messages, without what NATS adds.
    """

    site: Name
    region: Name = ""
    is_cut: bool = False  # no state of the site for CUT_S
    changed_s: TotalSeconds = 0.0  # time since it was cut, or connected
    round_trip_s: Duration | None = None  # to the site; None: not measured
    sent_bytes: Count = 0
    received_bytes: Count = 0
    num_states: Count = 0  # states of the site
    num_refused_states: Count = 0  # more of them than a site may send
    num_placed: Count = 0  # requests of this site that a scheduler placed there
    num_spilled: Count = 0  # of these, those that found no room here
    num_moved: Count = 0  # streams of a gateway that left the site before their end
    num_served: Count = 0  # requests of the site that a gateway took
    kv_bytes_per_s: TotalWork | None = None  # rate of KV pushed here, as a scheduler estimates it
    problem: Name = ""  # why states of the site are refused


class SignedCopy(msgspec.Struct, frozen=True, array_like=True):
    """A TenantCopy (`shared/tenancy/tenant_copy.py`) as msgpack, and its home site's signature."""

    body: Annotated[bytes, Meta(max_length=MAX_COPY_BYTES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


TenantVersions = Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=MAX_COPIES)]


class ReadTenantCopies(Message, frozen=True, kw_only=True):
    """Asks a gateway of the home site for the tenants that name the sender's site. `held` are the
    versions that the sender has. `gateway_id` is `{site}/{gateway}`.
    """

    gateway_id: ProcessId
    held: TenantVersions = ()

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class TenantCopies(Message, frozen=True, kw_only=True):
    """All tenants that the other site may serve now, and copies of those that differ from what it
    holds; the rest follows. `key` is the public half of the key that signs.
    """

    gateway_id: ProcessId
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    versions: TenantVersions = ()
    copies: Annotated[tuple[SignedCopy, ...], Meta(max_length=MAX_SENT_COPIES)] = ()

    @property
    def sender_id(self) -> str:
        return self.gateway_id


LimitCosts = Annotated[dict[Name, Count], Meta(max_length=8)]  # by the name of a limit


class LeaseStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a gateway reports of its share of a tenant's limits, and asks for.

    A report with a higher `number` replaces those before it. `spent` and `num_refunded` (output
    tokens) are totals of the share `lease_id`; `pool` is what the gateway keeps unspent, and gives
    the rest back. `asked` are the costs of requests that wait, and `ahead` what it would like to
    hold after them.
    """

    lease_id: Name
    number: Count
    spent: LimitCosts = {}
    num_refunded: Count = 0
    pool: LimitCosts = {}
    num_open: Count = 0
    asked: Annotated[tuple[LimitCosts, ...], Meta(max_length=MAX_ASKED)] = ()
    ahead: LimitCosts = {}


class LeaseState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A share after a step: what its gateway may spend, and for each request that it asked for the
    limit that rejects it, or "", and the time to wait. `used` is what all others have and hold.
    """

    pool: LimitCosts
    rejections: Annotated[tuple[tuple[Name, Duration], ...], Meta(max_length=MAX_ASKED)] = ()
    used: Annotated[dict[Name, TotalWork], Meta(max_length=8)]
    num_open: Count
    is_contended: bool


class LeaseLimits(Message, frozen=True, kw_only=True):
    """Runs one step of the sender's share of a tenant's limits at its home site. The reply is
    LimitsLeased. `tenant_id` is its name at home.
    """

    gateway_id: ProcessId
    tenant_id: Name
    step: LeaseStep

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class LimitsLeased(Message, frozen=True, kw_only=True):
    gateway_id: ProcessId
    state: LeaseState

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class ReportUsage(Message, frozen=True, kw_only=True):
    """The totals of a tenant's day at the sender's site, by `{kind}:{model}`. The reply is Done."""

    gateway_id: ProcessId
    tenant_id: Name
    day: Annotated[str, Meta(max_length=10)]  # UTC, YYYY-MM-DD
    totals: Annotated[
        tuple[tuple[Annotated[str, Meta(max_length=320)], Count], ...], Meta(max_length=256)
    ]

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class WithdrawTenant(Message, frozen=True, kw_only=True):
    """Has the receiving site drop what it holds of a tenant of the sender's site, but for processes
    in `kept_regions`: data of the tenant may be nowhere else any more. `tenant_id` is its name at
    home. `usage_of` are the creations, in Unix seconds, of removed tenants of this name whose usage
    is deleted, too. The reply is Done.
    """

    gateway_id: ProcessId
    tenant_id: Name
    kept_regions: Annotated[tuple[Name, ...], Meta(max_length=4096)] = ()
    usage_of: Annotated[tuple[float, ...], Meta(max_length=MAX_USAGE_OF)] = ()

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class ReadTenantKv(Message, frozen=True, kw_only=True):
    """What does the receiving site hold of a tenant of the sender's site? `tenant_id` is its name
    at home. The reply is SiteTenantKv.
    """

    gateway_id: ProcessId
    tenant_id: Name

    @property
    def sender_id(self) -> str:
        return self.gateway_id


class SiteTenantKv(Message, frozen=True, kw_only=True):
    """Tokens of a tenant's KV on all workers of a site: findable ones, those of requests that run,
    and both of those under a name that it may share with other tenants of its site. Workers that
    are `unknown` did not reply.
    """

    num_cached_tokens: Count
    num_held_tokens: Count
    num_shared_tokens: Count
    num_workers: Count
    num_unknown_workers: Count


class PrefixDigest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Changes of what a gateway's site holds of the prefixes that the receiving site has sent it,
    as packed fingerprints (`shared/sites/prefix_fingerprints.py`).

    Each receiving site has its own numbers, which grow by 1. After a gap a receiver forgets what it
    has of this gateway, until `is_first` says that all fingerprints follow, in this message and the
    next ones. Each region class has numbers of its own, too.
    """

    gateway_id: ProcessId
    epoch: Epoch
    sequence_number: Count
    is_first: bool = False
    added: Fingerprints = b""
    removed: Fingerprints = b""
    region_class: Name = ""  # that of the tenants whose prompts they are

    @property
    def sender_id(self) -> str:
        return self.gateway_id


# ── hosts ────────────────────────────────────────────────────────────────────────────────────────


class ParkWorker(Message, frozen=True, kw_only=True):
    """Stop accepting requests, end what runs, give the KV cache back and keep the weights.

    The reply is Done once the worker is in standby; WorkerBusy if a request still runs after
    `drain_s`: the worker then serves again as before.
    """

    drain_s: Duration


class WakeWorker(Message, frozen=True, kw_only=True):
    """Serve with a KV cache of this size. The reply is Done once the worker is ready."""

    kv_bytes: Count


class ResizeKv(Message, frozen=True, kw_only=True):
    """Change the size of a serving worker's KV cache. The reply is KvResized."""

    kv_bytes: Count


class KvResized(Message, frozen=True, kw_only=True):
    """The size of the cache, `kv_bytes`. A smaller one than before may still hold blocks of running
    requests: it shrinks as they end.
    """

    kv_bytes: Count


class ChangeRoles(Message, frozen=True, kw_only=True):
    """Take these roles. The reply is Done once the worker accepts requests in them; what runs in
    another role ends as before. WorkerBusy within `min_s` after the last change.
    """

    roles: Annotated[tuple[WorkerRole, ...], Meta(min_length=1, max_length=2)]
    min_s: Duration = 0.0


class DrainWorker(Message, frozen=True, kw_only=True):
    """Accept no more requests; a further one asks how far it is. The reply is DrainState.

    With `hand_over_s`, what still runs after that time is returned to its gateways, which continue
    it on other workers; without, it ends here. `is_undone`: serve again.
    """

    hand_over_s: Duration | None = None
    is_undone: bool = False


class DrainState(Message, frozen=True, kw_only=True):
    """What a worker still holds for others: with neither, it is safe to stop."""

    num_running: Count  # requests, also ended ones that their gateway has not acknowledged
    num_pushes: Count  # prompts whose KV no decode worker has in full

    @property
    def is_safe(self) -> bool:
        return not self.num_running and not self.num_pushes


MAX_PROFILED_STEPS = 200
MAX_PROFILE_S = 300.0


class ProfileSteps(Message, frozen=True, kw_only=True):
    """Record the next steps, for at most `timeout_s`. The reply is a ProfilePart; WorkerBusy while
    others are recorded.
    """

    num_steps: Annotated[int, Meta(ge=1, le=MAX_PROFILED_STEPS)]
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_PROFILE_S)]


class ReadProfile(Message, frozen=True, kw_only=True):
    """The reply is the part of the recording from a byte on, or its failure."""

    number: Count
    first_byte: Count = 0


class ProfilePart(Message, frozen=True, kw_only=True):
    """Recording `number` of a worker: a trace in JSON, compressed by gzip. Without `num_bytes` it
    is not complete yet.
    """

    number: Count
    num_steps: Count = 0
    num_bytes: Count | None = None
    data: bytes = b""


class WakeModel(Message, frozen=True, kw_only=True):
    """Make a model hot on a host. Idempotent. The reply is ModelWaking, or a Failure: NoCapacity
    if memory for it cannot be had, with a time if that may change.
    """

    model: Name
    revision: Name


class ModelWaking(Message, frozen=True, kw_only=True):
    state: ModelState
    ready_in_s: Duration  # expected


class ParkModel(Message, frozen=True, kw_only=True):
    """Put a hot model in standby. The reply is Done; WorkerBusy if it serves requests."""

    model: Name
    revision: Name


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one device that a host may use, and uses, for weights, KV and processes."""

    device: Name
    budget_bytes: Count
    used_bytes: Count


class HostedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that a host can serve.

    `card` is the worker's last announcement, or None until the model has been started once.
    Times are expected ones, from those measured last. `failure` is the reason for
    operators; `public_failure` is the same for clients, without paths: a clause such as
    "its source is missing".
    """

    name: Name
    revision: Name
    state: ModelState
    device: Name
    card: ModelCard | None = None
    worker_id: ProcessId | None = None  # None without a process
    weights_bytes: Count = 0  # bytes in memory, shared by the workers of a host
    kv_bytes: Count = 0  # the present size
    kv_floor_bytes: Count = 0  # the least that it is woken with; the present size if that is fixed
    offloaded_bytes: Count = 0  # those of weights_bytes that leave the device in standby
    wake_s: Duration = 0.0  # time from standby to hot
    start_s: Duration = 0.0  # time from cold to hot
    hot_s: Duration = 0.0  # time since it became hot; 0 if it is not
    is_pinned: bool = False
    priority: int = 0
    failure: str = ""
    public_failure: str = ""


class HostLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a host. `models` are all in the process; on the wire those that have changed
    after the version `changed_since` (`shared/lifecycle/host_models.py`). `removed` has names and
    revisions.
    """

    devices: Annotated[tuple[DeviceMemory, ...], Meta(max_length=64)]
    models: Annotated[tuple[HostedModel, ...], Meta(max_length=1024)] = ()
    models_version: Count = 0
    changed_since: Count = 0
    changed: Annotated[tuple[HostedModel, ...], Meta(max_length=64)] = ()
    removed: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=64)] = ()


class ListHostModels(Message, frozen=True, kw_only=True):
    """The reply is HostModelPage, of models from the `first` on."""

    first: Count = 0


class HostModelPage(Message, frozen=True, kw_only=True):
    version: Count
    num_models: Count
    models: Annotated[tuple[HostedModel, ...], Meta(max_length=256)]


class EncoderCard(msgspec.Struct, frozen=True, kw_only=True):
    """The image encoder with which a worker encodes for others. `key` names what the bits of its
    vectors depend on.
    """

    model: Name
    key: Name


class StartProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does before it is ready: "loading", "compiling", or what a later release
    does.
    """

    phase: Name
    model: Name = ""


class ResidencyRefusals(msgspec.Struct, frozen=True, array_like=True):
    """How often a process has refused, by one check, that data of a tenant is in a region; see
    `shared/tenancy/refusals.py`.
    """

    check: Name
    tenant_id: Name
    region: Name
    count: Count = 1


class Heartbeat(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a process, sent every `interval_s` by the loop that does the work, so it proves
    progress.

    Every process decodes those of all others: on the wire defaults are left out.
    """

    process_id: ProcessId
    epoch: Epoch  # random at each start
    sequence_number: Count
    roles: Annotated[tuple[Role, ...], Meta(min_length=1, max_length=8)]
    state: Annotated[ProcessState, Meta(extra={"newer": "starting"})]  # of a later release
    interval_s: Duration
    region: Name = ""
    load: WorkerLoad | None = None
    model: ModelCard | None = None
    kv_targets: KvTargets = ()  # where a worker receives KV, if it does
    index: IndexLoad | None = None
    num_impostors: Count = 0  # messages rejected since its start for a wrong sender
    uptime_s: TotalSeconds = 0.0  # the younger of two processes with one id leaves
    gateway: GatewayLoad | None = None
    host: HostLoad | None = None
    scheduler: SchedulerLoad | None = None
    possible_roles: tuple[WorkerRole, ...] = ()  # roles that ChangeRoles may give this worker
    release: Name = ""  # version of the sender's Hearth
    num_bus_reconnects: Count = 0  # reconnects to NATS, since its start
    num_failed_items: Count = 0  # failed items of others, whose work raised in it, since its start
    store: StoreLoad | None = None  # state of Redis, if the process uses it
    host_name: Name = ""  # the machine that the process runs on
    starting: StartProgress | None = None  # with the state "starting"; may be silent for a while
    links: Annotated[tuple[LinkLoad, ...], Meta(max_length=MAX_LINKS)] = ()  # to other sites
    # Since its start: the kinds that came last, and all by their check
    refusals: Annotated[tuple[ResidencyRefusals, ...], Meta(max_length=MAX_REFUSALS)] = ()
    num_refusals: Annotated[tuple[tuple[Name, Count], ...], Meta(max_length=32)] = ()
    encoder: EncoderCard | None = None  # None: the process encodes no images for others

    @property
    def sender_id(self) -> str:
        return self.process_id
