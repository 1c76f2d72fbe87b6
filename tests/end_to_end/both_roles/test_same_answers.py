"""The demo model served from a bundle by workers of both roles: same answers as its checkpoint."""

from __future__ import annotations

from pathlib import Path

from shared.messages import Heartbeat
from tests.support.cluster.cluster_client import ClusterClient

QUESTIONS = ("What is the KV cache?", "What is a scheduler?", "Tell me about rivers.")


def _answers(cluster: ClusterClient) -> list[object]:
    """Texts with the log-probability of each token."""
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 48}
    return [cluster.complete(question, **options)["choices"][0] for question in QUESTIONS]


def _revisions(cluster: ClusterClient) -> set[str | None]:
    beats = cluster.wait_for_heartbeats(lambda newest: any(map(_revision, newest.values())))
    return {_revision(beat) for beat in beats.values()} - {None}


def _revision(heartbeat: Heartbeat) -> str | None:
    return None if heartbeat.model is None else heartbeat.model.revision


def test_bundle_answers_equal_checkpoint_answers(
    cluster: ClusterClient, bundled: ClusterClient, bundle: Path
) -> None:
    assert not list(bundle.glob("model.safetensors"))
    assert bundled.model == "bundle"
    assert _answers(bundled) == _answers(cluster)
    assert _revisions(bundled) == _revisions(cluster)  # workers of one revision may share KV


def test_worker_with_both_roles_answers(bundled: ClusterClient) -> None:
    answer = bundled.complete("What is the KV cache?")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "token" in answer["choices"][0]["message"]["content"]
    hearth = answer["hearth"]
    assert hearth["decode_worker"].startswith("worker-")
    assert hearth["prefill_worker"] is None or hearth["prefill_worker"].startswith("worker-")
