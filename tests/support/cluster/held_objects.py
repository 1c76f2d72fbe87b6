"""What a process of a cluster holds for requests, from its census."""

from __future__ import annotations

import asyncio

from tests.support.cluster.chaos_cluster import ChaosCluster
from tests.support.waiting import wait_until

# Objects that live for one request, one try or one connection, by module.
PER_REQUEST = frozenset(
    {
        "services.gateway.http.response.GenerationResponse",
        "services.gateway.streams.choice_tokens.ChoiceTokens",
        "services.gateway.request.request_output.RequestOutput",
        "services.gateway.request.output_merger.OutputMerger",
        "services.gateway.streams.early_entries.EarlyEntry",
        "services.gateway.streams.stream.CurrentPlacement",
        "services.gateway.streams.stream.Stream",
        "services.scheduler.backlog.QueuedRequest",
        "shared.output.output_buffer.Output",
        "services.decode.handoff.Handoff",
        "services.decode.running_request.RunningRequest",
        "shared.engine.kv.kv_writer.KvWriter",
        "shared.engine.kv.kv_sender.KvSender",
        "services.prefill.service.Prefill",
        "services.encode.service.Encoding",
        "shared.engine.vision.image_jobs.WantedImage",
        "shared.engine.vision.image_jobs._Job",
        "shared.engine.vision.image_jobs._SharedVectors",
        "shared.engine.vision.sequence_images.WantedImages",
        "shared.pixels.byte_transfer.ByteTransfer",
        "shared.pixels.pixel_holder.HeldImage",
        "shared.engine.batching.batcher.ScheduledSequence",
        "shared.engine.batching.sequence.Sequence",
        "shared.engine.sampling.token_counts.TokenCounts",
    }
)


def of_requests(census: dict[str, int]) -> dict[str, int]:
    """Returns the objects of a census that live for one request, one try or one connection."""
    return {name: count for name, count in census.items() if name in PER_REQUEST}


def wait_until_nothing_is_held(cluster: ChaosCluster, *lost: str) -> None:
    """Waits until no process but the `lost` ones holds anything of a request. Raises NotReached."""
    names = cluster.services.keys() - set(lost)

    def held() -> dict[str, dict[str, int]]:
        found = {name: of_requests(asyncio.run(cluster.census(name))) for name in sorted(names)}
        return {name: each for name, each in found.items() if each}

    wait_until(lambda: not held(), poll_s=0.25, seen=held)
