"""The demo model served from a bundle by `hearth up --model`: same answers as its checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from services.cli.service_options import DEMO_MODEL_DIR
from shared.messages import Heartbeat
from tests.end_to_end.cluster import Cluster, run_cluster

QUESTIONS = ("What is the KV cache?", "What is a scheduler?", "Tell me about rivers.")


def _answers(cluster: Cluster) -> list[object]:
    """Texts with the log-probability of each token."""
    options = {"logprobs": True, "top_logprobs": 2, "max_tokens": 48}
    return [cluster.complete(question, **options)["choices"][0] for question in QUESTIONS]


def _revisions(cluster: Cluster) -> set[str | None]:
    beats = cluster.wait_for_heartbeats(lambda newest: any(map(_revision, newest.values())))
    return {_revision(beat) for beat in beats.values()} - {None}


def _revision(heartbeat: Heartbeat) -> str | None:
    return None if heartbeat.model is None else heartbeat.model.revision


def test_bundle_answers_equal_checkpoint_answers(cluster: Cluster, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    command = [sys.executable, "-m", "services", "compress", str(DEMO_MODEL_DIR), str(bundle)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "mlp.up_proj" in done.stdout
    assert not list(bundle.glob("model.safetensors"))
    with run_cluster(tmp_path / "state", "--model", str(bundle), "--role", "both") as bundled:
        assert bundled.model == "bundle"
        assert _answers(bundled) == _answers(cluster)
        assert _revisions(bundled) == _revisions(cluster)  # workers of one revision may share KV
