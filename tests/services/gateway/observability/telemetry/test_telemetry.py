"""The timelines of a response of many prompts."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.observability.telemetry.telemetry import MAX_PER_TURN, RequestTelemetry
from services.gateway.streams.receiver import StreamEnd
from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from shared.telemetry.timeline import Timeline
from tests.services.gateway.request.test_request_output import delivery_of
from tests.support.world.clock import VirtualClock, run

NUM_PROMPTS = 5 * MAX_PER_TURN


@pytest.mark.parametrize("is_closing", [False, True])
def test_timelines_of_many_prompts_are_built_in_parts(
    gateway_config: GatewayConfig, model_files: ModelFiles, is_closing: bool
) -> None:
    """The gateway's end waits for no turn."""

    async def main() -> None:
        observed: list[Timeline] = []
        telemetry = RequestTelemetry(
            "gateway-1", VirtualClock(), lambda: 0.0, observe=observed.append
        )
        outputs = [
            delivery_of(gateway_config, model_files, max_tokens=8) for _ in range(NUM_PROMPTS)
        ]
        for number, output in enumerate(outputs):
            output.request_id = f"r-{number}"
            output.on_end(StreamEnd(None, "w", 0))
        record = telemetry.begin("r-0")
        telemetry.ended(record, "m", outputs)
        telemetry.closed(record, "m", outputs)
        found = telemetry.find(f"r-{NUM_PROMPTS - 1}")
        assert found is not None and found.model == "m"
        if is_closing:
            await telemetry.close()
        else:
            before = 0
            while len(observed) < NUM_PROMPTS:
                assert 0 < len(observed) - before <= MAX_PER_TURN + 1
                before = len(observed)
                await asyncio.sleep(0)
        assert [each.request_id for each in observed] == [each.request_id for each in outputs]

    run(main())
