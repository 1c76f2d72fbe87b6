"""Tokens of decode steps by CUDA graphs, beside those of the same steps launched one by one.

Several sequences of different lengths, greedy and drawn, pass through sizes of batches with and
without padding. In the exact mode all tokens are equal. A few layers of the 8B shape.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_kit.models.model_8b import folder_of
from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from shared.engine.executors.local_executor import LocalExecutor

LAYERS = {"device": 8, "dry": 1, "compile": 2}
LENGTHS = (5, 40, 130, 700, 3, 64, 65, 1030, 17, 300, 250)  # tokens of the prompts
NUM_TOKENS = 24
VOCAB = 500  # of the prompts


def run(session: Session) -> None:
    """Raises RuntimeError if a token differs."""
    from benchmarks.gpu_kit.model_steps.loading import load

    config = session.shapes.config | {"num_hidden_layers": LAYERS[session.mode]}
    with folder_of(config) as folder:
        executor, _ = load(session, folder, "exact")
    graphs = getattr(executor.computer, "graphs", None)
    found = _generated(session, executor, "graphs")
    if session.is_dry:
        return
    assert graphs is not None, "a CUDA executor has graphs"
    session.add(case="steps", replayed=graphs.num_replayed, eager=graphs.num_eager)
    executor.computer.graphs = None  # type: ignore[attr-defined]
    wanted = _generated(session, executor, "plain")
    different = [n for n, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    session.add(case="tokens", sequences=len(wanted), different=different)
    if different:
        raise RuntimeError(f"sequences {different} have other tokens by graphs")


def _generated(session: Session, executor: LocalExecutor, case: str) -> list[list[int]]:
    """Returns the tokens of each sequence."""
    from pathlib import Path

    from shared.messages import SamplingParams
    from tests.support.engine.model_worker import Worker
    from tests.support.engine.rig import new_sequence

    lengths = LENGTHS[:2] if session.is_dry else LENGTHS
    sequences = []
    for n, length in enumerate(lengths):
        drawn: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9} if n % 3 else {}
        sampling = SamplingParams(
            seed=n,
            max_tokens=2 if session.is_dry else NUM_TOKENS + n,
            **{"temperature": 0.0, **drawn},
        )
        prompt = [(7 * k + n * k * k) % (VOCAB - 3) + 3 for k in range(length)]
        sequences.append(new_sequence(prompt, sampling, tenant_id=case))
    worker = Worker(Path(), "bfloat16", executor=executor, budget=512)
    started = time.perf_counter()
    asyncio.run(worker.run(*sequences))
    took = {} if session.is_dry else {"seconds": round(time.perf_counter() - started, 2)}
    session.add(case=case, **took)
    return [worker.tokens[each.sequence_id] for each in sequences]
