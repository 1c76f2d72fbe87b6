"""Latents go from worker to worker: one row a token, whatever the number of heads and ranks."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from shared.engine.parallel.mesh_shape import MeshShape
from tests.shared.engine.executors.group.test_group_handoff import (
    NUM_TOKENS,
    PP_2,
    TP_1,
    TP_2,
    Fleet,
    Handoff,
    assert_continues,
)
from tests.shared.engine.executors.group.test_groups import SHAPE
from tests.support.engine.checkpoints import write_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

LATENTS = {
    "head_dim": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "kv_lora_rank": 20,
    "q_lora_rank": 14,
    "first_k_dense_replace": 3,
}
ROW_BYTES = (20 + 8) * 2  # BF16, of one token and layer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    folder = tmp_path_factory.mktemp("deepseek")
    write_model(folder, "DeepseekV3ForCausalLM", **{**SHAPE, **LATENTS})
    it = Fleet(folder)
    yield it
    for worker in it.workers.values():
        await worker.close()


@pytest.mark.parametrize(
    ("source", "target", "num_copies"),
    [
        (TP_1, TP_2, 2),
        *(pytest.param(source, TP_1, 1, marks=pytest.mark.long) for source in (TP_1, TP_2, PP_2)),
    ],
)
async def test_each_target_gets_every_row_once(
    fleet: Fleet, source: MeshShape, target: MeshShape, num_copies: int
) -> None:
    """One rank of a stage sends, although all hold the rows; ranks that receive hold a copy each.
    Decode goes on with the bits of one process.
    """
    handoff = Handoff(await fleet.of(source), await fleet.of(target))
    num_bytes = NUM_TOKENS * SHAPE["num_hidden_layers"] * ROW_BYTES
    assert await handoff.run() == num_bytes * num_copies
    await assert_continues(fleet, source, target)
