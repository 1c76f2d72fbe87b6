"""The durations and sizes of requests that are histograms, and their values from a timeline."""

from __future__ import annotations

from services.gateway.observability.metrics.histograms import (
    BYTES,
    LONG,
    MIDDLE,
    SHORT,
    VLLM_ITL,
    VLLM_REQUEST,
    VLLM_TOKENS,
    VLLM_TTFT,
    HistogramSpec,
    ModelHistograms,
)
from shared.messages import LATENCY_BOUNDS_S
from shared.telemetry.timeline import Phase, PhaseName, Timeline, Try

QUEUE = "queue_seconds"
PREFILL = "prefill_seconds"
TRANSFER = "transfer_seconds"
DECODE = "decode_seconds"
INFERENCE = "inference_seconds"
TTFT = "time_to_first_token_seconds"
ITL = "inter_token_seconds"
REQUEST = "request_seconds"
HANDOFF_BYTES = "handoff_bytes"
PROMPT_TOKENS = "prompt_tokens"
OUTPUT_TOKENS = "output_tokens"

SPECS = (
    HistogramSpec(
        QUEUE, "Wait at the scheduler.", MIDDLE, "request_queue_time_seconds", VLLM_REQUEST
    ),
    HistogramSpec(
        PREFILL, "Computing a prompt.", MIDDLE, "request_prefill_time_seconds", VLLM_REQUEST
    ),
    HistogramSpec(TRANSFER, "Pushing a prompt's KV after it was computed.", SHORT),
    HistogramSpec(
        DECODE, "First to last token.", LONG, "request_decode_time_seconds", VLLM_REQUEST
    ),
    HistogramSpec(
        INFERENCE,
        "Prefill and decode of a request.",
        vllm_name="request_inference_time_seconds",
        vllm_buckets=VLLM_REQUEST,
    ),
    HistogramSpec(TTFT, "Submit to first token.", MIDDLE, TTFT, VLLM_TTFT, LATENCY_BOUNDS_S),
    HistogramSpec(
        ITL,
        "Between two token entries.",
        SHORT,
        "inter_token_latency_seconds",
        VLLM_ITL,
        LATENCY_BOUNDS_S,
    ),
    HistogramSpec(REQUEST, "Arrival to end.", LONG, "e2e_request_latency_seconds", VLLM_REQUEST),
    HistogramSpec(HANDOFF_BYTES, "KV pushed for one prompt.", BYTES),
    HistogramSpec(
        PROMPT_TOKENS,
        "Tokens of a request's prompt.",
        vllm_name="request_prompt_tokens",
        vllm_buckets=VLLM_TOKENS,
    ),
    HistogramSpec(
        OUTPUT_TOKENS,
        "Tokens that a request generated.",
        vllm_name="request_generation_tokens",
        vllm_buckets=VLLM_TOKENS,
    ),
)
_BY_PHASE: dict[PhaseName, str] = {
    "queue": QUEUE,
    "prefill": PREFILL,
    "kv_push": TRANSFER,
    "decode": DECODE,
}


def observe(histograms: ModelHistograms, timeline: Timeline) -> None:
    """Adds the values of a timeline. Each try's phases count, since each took time. A rejected
    request has no values.
    """
    if not timeline.tries:
        return
    histograms.observe(REQUEST, timeline.duration_s)
    histograms.observe(PROMPT_TOKENS, timeline.num_prompt_tokens)
    histograms.observe(OUTPUT_TOKENS, timeline.num_output_tokens)
    for each in timeline.tries:
        _observe_try(histograms, each)


def _observe_try(histograms: ModelHistograms, one: Try) -> None:
    inference_s = 0.0
    for phase in one.phases:
        _observe_phase(histograms, phase)
        if phase.name in ("prefill", "first_token", "decode"):
            inference_s += phase.duration_s
    if inference_s:
        histograms.observe(INFERENCE, inference_s)


def _observe_phase(histograms: ModelHistograms, phase: Phase) -> None:
    name = _BY_PHASE.get(phase.name)
    if name is not None:
        histograms.observe(name, phase.duration_s)
    if phase.name == "kv_push":
        histograms.observe(HANDOFF_BYTES, phase.num_bytes)
