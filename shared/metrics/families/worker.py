"""Families of workers: what an engine does, its KV cache, its handoffs and its failures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from shared.device_health.nvml_device import THROTTLES
from shared.messages import Heartbeat, WorkerLoad
from shared.metrics.families.failed_operations import FailedOperations, failed_families
from shared.metrics.families.member import Member, Value, families

VALUES = (
    Value("running_requests", "Sequences in the batch.", lambda load: load.num_running),
    Value("waiting_requests", "Sequences that wait for the batch.", lambda load: load.num_waiting),
    Value("kv_blocks", "Blocks of the KV cache.", lambda load: load.num_total_blocks),
    Value("kv_free_blocks", "Blocks free or only cached.", lambda load: load.num_free_blocks),
    Value(
        "kv_reserved_blocks",
        "Blocks that wait for a handoff's KV.",
        lambda load: load.num_reserved_blocks,
    ),
    Value("kv_usage_ratio", "Share of the KV cache in use, 0 to 1.", lambda load: kv_usage(load)),
    Value(
        "handoffs_in_flight",
        "Prefills that run elsewhere for this decode worker.",
        lambda load: load.num_handoffs_in_flight,
    ),
    Value("handoffs", "Prefills handed to another worker.", lambda load: load.num_handoffs, True),
    Value(
        "handoff_ack_seconds",
        "Wait for the replies to those commands.",
        lambda load: load.handoff_ack_s,
        True,
    ),
    Value("steps", "Steps that computed something.", lambda load: load.num_busy_steps, True),
    Value("busy_seconds", "Time of those steps.", lambda load: load.busy_s, True),
    Value(
        "memory_traffic_bytes",
        "Bytes of weights and KV that those steps read and wrote, counted by their shapes.",
        lambda load: load.traffic_bytes,
        True,
    ),
    Value(
        "operations",
        "Arithmetic operations of those steps, counted by their shapes.",
        lambda load: load.num_operations,
        True,
    ),
    Value("generated_tokens", "Sampled tokens.", lambda load: load.num_generated_tokens, True),
    Value(
        "computed_prompt_tokens",
        "Prompt tokens whose KV was computed here.",
        lambda load: load.num_computed_prompt_tokens,
        True,
    ),
    Value(
        "prompt_tokens",
        "Prompt tokens of admitted sequences.",
        lambda load: load.num_prompt_tokens,
        True,
    ),
    Value(
        "cached_prompt_tokens",
        "Those whose KV was in this worker's cache.",
        lambda load: load.num_cached_prompt_tokens,
        True,
    ),
    Value(
        "out_of_memory",
        "Operations of its device that had too little memory: they were computed in parts.",
        lambda load: load.num_out_of_memory,
        True,
    ),
    Value(
        "lowered_step_tokens",
        "Tokens of a step at most, since one ran out of memory; 0: as configured.",
        lambda load: load.max_step_tokens,
    ),
    Value("encoded_images", "Images encoded.", lambda load: load.num_encoded_images, True),
    Value(
        "reused_images",
        "Images that a request wanted and that were encoded already.",
        lambda load: load.num_reused_images,
        True,
    ),
    Value("encoded_tiles", "Tiles of images encoded.", lambda load: load.num_encoded_tiles, True),
    Value("encode_seconds", "Time with a tile in the encoder.", lambda load: load.encode_s, True),
    Value(
        "fetched_images",
        "Images whose vectors came from another worker.",
        lambda load: load.num_fetched_images,
        True,
    ),
    Value("preemptions", "Sequences preempted.", lambda load: load.num_preemptions, True),
    Value(
        "pushed_tokens", "Tokens whose KV was pushed.", lambda load: load.num_pushed_tokens, True
    ),
    Value("push_seconds", "Time of those pushes.", lambda load: load.push_s, True),
    Value(
        "kv_mismatches",
        "KV rejected because of another format or other numerics.",
        lambda load: load.num_kv_mismatches,
        True,
    ),
    Value(
        "failed_handoffs",
        "Attempts of a prefill that another worker did not complete.",
        lambda load: load.num_failed_handoffs,
        True,
    ),
)

PEAKS = (
    Value(
        "bytes_per_second",
        "The memory's bandwidth by the data sheet of the worker's GPU, if it is known.",
        lambda peaks: peaks.bytes_per_s,
    ),
    Value(
        "operations_per_second",
        "The same of its operations in BF16.",
        lambda peaks: peaks.operations_per_s,
    ),
)


def kv_usage(load: WorkerLoad) -> float:
    """Returns the share of blocks that running sequences and reservations hold; 0
    without a KV cache.
    """
    if not load.num_total_blocks:
        return 0.0
    return 1.0 - min(load.num_free_blocks, load.num_total_blocks) / load.num_total_blocks


def worker_families(
    members: Iterable[Member], failed: Mapping[str, FailedOperations]
) -> Iterator[Metric]:
    """Yields the metrics of workers. `failed` has the failures of workers that have stopped."""
    heartbeats = [each.heartbeat for each in members if each.heartbeat.load is not None]
    loads = [(each.process_id, each.load) for each in heartbeats if each.load is not None]
    yield from families(VALUES, "hearth_worker", "worker", loads)
    peaks = [(worker, load.peaks) for worker, load in loads if load.peaks is not None]
    yield from families(PEAKS, "hearth_worker_peak", "worker", peaks)
    yield _info(heartbeats)
    yield from _by_outcome(heartbeats)
    yield from failed_families(loads, failed)
    yield _throttles(loads)


def _info(heartbeats: Iterable[Heartbeat]) -> Metric:
    info = GaugeMetricFamily(
        "hearth_worker_info",
        "1, with what a worker serves.",
        labels=["worker", "model", "revision", "mode", "block_size"],
    )
    for each in heartbeats:
        card = each.model
        if card is not None:
            mode = card.numerics.mode
            info.add_metric(
                [each.process_id, card.name, card.revision, mode, str(card.block_size)], 1
            )
    return info


def _throttles(loads: Iterable[tuple[str, WorkerLoad]]) -> Metric:
    throttles = GaugeMetricFamily(
        "hearth_worker_gpu_throttled",
        "Whether the clocks of a worker's GPU are lower now for this reason.",
        labels=["worker", "reason"],
    )
    for worker_id, load in loads:
        if load.device_health is None:
            continue
        now = load.device_health.throttles
        for reason in sorted({*THROTTLES.values(), *now}):
            throttles.add_metric([worker_id, reason], reason in now)
    return throttles


def _by_outcome(heartbeats: Iterable[Heartbeat]) -> Iterator[Metric]:
    frames = CounterMetricFamily(
        "hearth_worker_kv_frames",
        "KV frames that a worker accepted or rejected, by outcome.",
        labels=["worker", "outcome"],
    )
    saved = CounterMetricFamily(
        "hearth_worker_kv_saved_bytes",
        "Bytes that a worker did not push because KV was sent compressed.",
        labels=["worker"],
    )
    grammars = CounterMetricFamily(
        "hearth_worker_grammars",
        "Of a decode worker's grammars: late masks, failed choices, and abandoned threads.",
        labels=["worker", "outcome"],
    )
    experts = GaugeMetricFamily(
        "hearth_worker_expert_imbalance",
        "Tokens of the busiest expert over the mean, in the worst layer, of the last minutes.",
        labels=["worker"],
    )
    for each in heartbeats:
        worker_id, load = each.process_id, each.load
        assert load is not None
        if "decode" in each.roles:
            for outcome, count in _frames(load).items():
                frames.add_metric([worker_id, outcome], count)
            for outcome, count in _grammars(load).items():
                grammars.add_metric([worker_id, outcome], count)
        if "prefill" in each.roles:
            saved.add_metric([worker_id], load.saved_kv_bytes)
        if load.expert_imbalance:
            experts.add_metric([worker_id], load.expert_imbalance)
    yield from (frames, saved, grammars, experts)


def _frames(load: WorkerLoad) -> dict[str, int]:
    return {
        "taken": load.num_kv_frames,
        "corrupt": load.num_corrupt_kv_frames,
        "unknown": load.num_unknown_kv_frames,
        "refused": load.num_refused_kv_frames,
        "broken_off": load.num_bad_kv_peers,
    }


def _grammars(load: WorkerLoad) -> dict[str, int]:
    return {
        "late_mask": load.num_late_masks,
        "failed": load.num_failed_grammars,
        "abandoned_thread": load.num_abandoned_grammar_threads,
    }
