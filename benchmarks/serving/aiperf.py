"""AIPerf as the client: NVIDIA's own, far heavier than Hearth's. `pip install aiperf==0.13`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec

from benchmarks.serving.closed_loop import Target
from services.cli.cluster.service_options import DEMO_MODEL_DIR

RESULT_FILE = "profile_export_aiperf.json"


class Value(msgspec.Struct):
    avg: float = 0.0
    p50: float = 0.0
    p99: float = 0.0


class Profile(msgspec.Struct):
    """The used part of its result file; TTFT in milliseconds."""

    request_throughput: Value
    request_count: Value
    time_to_first_token: Value
    output_sequence_length: Value
    error_request_count: Value = msgspec.field(default_factory=Value)


async def aiperf(
    venv: Path,
    target: Target,
    *,
    concurrency: int,
    num_requests: int,
    num_input_tokens: int,
    num_output_tokens: int,
) -> Profile:
    """Runs AIPerf. Raises RuntimeError with the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        process = await asyncio.create_subprocess_exec(
            str(venv / "bin" / "aiperf"),
            "profile",
            "-u",
            target.url,
            "-m",
            target.model,
            "--api-key",
            target.api_key,
            "--endpoint-type",
            "chat",
            "--streaming",
            "--tokenizer",
            str(DEMO_MODEL_DIR),
            "--ui",
            "none",
            "--artifact-dir",
            folder,
            "--concurrency",
            str(concurrency),
            "--request-count",
            str(num_requests),
            "--synthetic-input-tokens-mean",
            str(num_input_tokens),
            "--synthetic-input-tokens-stddev",
            "0",
            "--output-tokens-mean",
            str(num_output_tokens),
            "--output-tokens-stddev",
            "0",
            "--extra-inputs",
            "ignore_eos:true",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
        )
        output, _ = await process.communicate()
        profile = _profile(Path(folder))
        if process.returncode or profile is None:
            raise RuntimeError(f"aiperf: {output.decode(errors='replace')[-500:]}")
        return profile


def _profile(folder: Path) -> Profile | None:
    for path in folder.rglob(RESULT_FILE):
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    return None
