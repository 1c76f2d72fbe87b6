"""The parts of a schedule that a seed determines in advance: fleet, requests, faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shared.engine.executors.timing_executor import StepCost
from shared.kv_layout import Reach
from shared.messages import Pooling, SamplingParams, WorkerRole
from tests.support.world.workers import BLOCK_SIZE, MODEL

FaultKind = Literal[
    "kill", "freeze", "slow", "wedge", "drain", "cut_off",
    "nats_restart", "nats_hang", "redis_away", "redis_hang",
    "noise", "deaf", "link_drop", "link_noise", "runner_raises", "twin",
    "rank_killed", "rank_frozen", "gpu_faulty", "change_roles",
    "wake_hangs", "dies_after_wake", "model_removed",
]  # fmt: skip

DEMO = ("demo/1",)  # what some workers have and some requests need
TENANTS = ("tenant-a", "tenant-b", "tenant-c")
POISON = 7  # a token for which every step raises; random prompts and outputs do not contain it
UNDISTURBED_S = 20.0  # one that is missed only if hosts have faults
PATIENT_S = 120.0  # a deadline that is missed only by a fleet without capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedPlan:
    """Hosts of one device each, whose workers serve `models`. Memory is for `num_resident` workers
    and the smallest caches of `num_hot` of them.
    """

    num_hosts: int
    models: tuple[str, ...]
    num_resident: int
    num_hot: int
    wake_s: float
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    num_gateways: int
    num_schedulers: int
    num_indices: int
    num_prefill: int
    num_decode: int
    num_both: int
    num_blocks: int
    max_batch_tokens: int
    max_sequences: int
    cost: StepCost
    copy_s: float
    max_queued_requests: int
    pool_sizes: Mapping[str, int] | None = None  # in blocks, by worker; None: `num_blocks` each
    block_sizes: Mapping[str, int] | None = None  # in tokens, by worker; None: BLOCK_SIZE each
    reaches: tuple[Reach, ...] = (None,)  # of the model's groups of layers
    # workers whose steps are computed by a group of ranks: steps in flight, stages
    groups: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    unlike: tuple[str, ...] = ()  # workers whose device computes other bits
    capable: tuple[str, ...] = ()  # workers that start with the features DEMO
    has_automatic_roles: bool = False  # schedulers change the roles of workers
    changing: tuple[str, ...] = ()  # workers that gain or lose them with each restart
    hosted: HostedPlan | None = None

    def num_blocks_of(self, worker_id: str) -> int:
        """Blocks of each group of layers; any group may take those of another."""
        return self.num_blocks if self.pool_sizes is None else self.pool_sizes[worker_id]

    def block_size_of(self, worker_id: str) -> int:
        return BLOCK_SIZE if self.block_sizes is None else self.block_sizes[worker_id]

    def features_of(self, worker_id: str, num_restarts: int) -> tuple[str, ...]:
        is_changed = worker_id in self.changing and num_restarts % 2 == 1
        return DEMO if (worker_id in self.capable) != is_changed else ()

    def is_older(self, worker_id: str, num_restarts: int) -> bool:
        """Whether its code has never known features: it does not check what a request needs."""
        was_capable = worker_id in self.changing and num_restarts > 0
        return not (was_capable or self.features_of(worker_id, num_restarts))

    def decodes_for(self, *, num_tokens: int, block_size: int) -> list[str]:
        """The workers that can decode a sequence of `num_tokens` with hashes of `block_size`."""
        ids = self.process_ids
        return [
            each
            for each in ids["decode"] + ids["worker"]
            if self.block_size_of(each) == block_size
            and self.num_blocks_of(each) * block_size >= num_tokens
        ]

    # The region of each process (default ""), and the one-way delay between two regions: messages
    # and KV take so much longer. A pair that is not listed, in either order, has none.
    regions: Mapping[str, str] = field(default_factory=dict)
    delays_s: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def delay_s(self, sender_id: str, receiver_id: str) -> float:
        """The one-way delay between two processes. A process is no distance from itself."""
        if not self.delays_s or sender_id == receiver_id:
            return 0.0
        pair = self.regions.get(sender_id, ""), self.regions.get(receiver_id, "")
        return self.delays_s.get(pair, self.delays_s.get(pair[::-1], 0.0))

    @property
    def worker_ids(self) -> list[str]:
        ids = self.process_ids
        return ids["prefill"] + ids["decode"] + ids["worker"]

    @property
    def process_ids(self) -> dict[str, list[str]]:
        counts = {
            "gateway": self.num_gateways,
            "scheduler": self.num_schedulers,
            "kv_index": self.num_indices,
            "prefill": self.num_prefill,
            "decode": self.num_decode,
            "worker": self.num_both,
            "host": 0 if self.hosted is None else self.hosted.num_hosts,
        }
        return {role: [f"{role}-{i}" for i in range(count)] for role, count in counts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    request_id: str
    at_s: float
    tenant_id: str
    prompt: tuple[int, ...]
    num_choices: int
    sampling: SamplingParams
    deadline_s: float
    pooling: Pooling | None  # an embedding is requested
    stop_modulus: int  # token ids divisible by it are stop strings; 0: none
    leaves_after_s: float | None  # the client leaves
    needs: tuple[str, ...] = ()  # features
    regions: tuple[str, ...] = ()  # that it may be served in; empty: all
    model: str = MODEL

    @property
    def num_context_tokens(self) -> int:
        """Of the longest choice at its end; its last token needs no KV."""
        return len(self.prompt) + self.sampling.max_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    at_s: float
    kind: FaultKind
    target: str = ""  # a process, or empty
    other: str = ""  # the peer whose messages a deaf process loses
    duration_s: float = 0.0
    comes_back: bool = True
    # of noise and of steps that raise: a probability (1: checks raise too); of slowness: a factor
    amount: float = 0.0
    roles: tuple[WorkerRole, ...] = ()  # that a worker changes to


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    seed: int
    fleet: FleetPlan
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]

    def has(self, *kinds: FaultKind) -> bool:
        return any(fault.kind in kinds for fault in self.faults)
