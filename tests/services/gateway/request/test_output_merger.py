"""The outputs of one response, whose events come in parts that leave turns to other streams."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.output.events import Event, TextDelta
from services.gateway.output.events import Usage as UsageEvent
from services.gateway.request import output_merger
from services.gateway.request.output_merger import MAX_OUTPUTS, OutputMerger
from services.gateway.request.prompt import Echo
from services.gateway.streams.receiver import StreamEnd
from services.gateway.text.model_files import ModelFiles
from shared.config import GatewayConfig
from shared.errors import NoCapacity
from shared.messages import TokenLogprobs
from tests.services.gateway.request.test_request_output import LENGTH, delivery_of
from tests.support.world.clock import run

NUM_PROMPTS = 3 * MAX_OUTPUTS


async def read(merger: OutputMerger) -> tuple[list[list[Event]], int]:
    """Returns the events of each `next`, and the turns that another task had meanwhile."""
    num_turns, parts = 0, []

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    while events := await merger.next():
        parts.append(events)
    other.cancel()
    return parts, num_turns


def test_many_outputs_are_returned_in_parts_between_turns_of_others(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    async def main() -> None:
        outputs = [
            delivery_of(gateway_config, model_files, max_tokens=8) for _ in range(NUM_PROMPTS)
        ]
        merger = OutputMerger(outputs)
        for output in outputs:
            output.on_tokens(0, model_files.tokenizer.encode(["a"]), ())
            output.on_finish(0, LENGTH)
            output.on_end(StreamEnd(None, "w", 0))
        parts, num_turns = await read(merger)
        texts = [
            each.choice_index for part in parts for each in part if isinstance(each, TextDelta)
        ]
        assert texts == [*range(NUM_PROMPTS)]
        assert max(len(part) for part in parts) <= 2 * MAX_OUTPUTS + 1
        assert num_turns >= len(parts) - 1 >= 2
        assert parts[-1][-1] == UsageEvent(NUM_PROMPTS, 0, NUM_PROMPTS)
        assert merger.is_complete

    run(main())


def test_events_of_the_last_output_do_not_wait_for_events_of_the_first(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    async def main() -> None:
        outputs = [
            delivery_of(gateway_config, model_files, max_tokens=8)
            for _ in range(2 * MAX_OUTPUTS + 1)
        ]
        merger = OutputMerger(outputs)
        outputs[-1].on_tokens(0, model_files.tokenizer.encode(["a"]), ())
        (event,) = await merger.next()
        assert isinstance(event, TextDelta) and event.choice_index == 2 * MAX_OUTPUTS

    run(main())


def test_error_of_one_output_does_not_wait_for_the_end_of_the_others(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    async def main() -> None:
        failing, other = (delivery_of(gateway_config, model_files, max_tokens=8) for _ in range(2))
        merger = OutputMerger([failing, other])
        token_ids = model_files.tokenizer.encode(["a"])
        for output in (failing, other):
            output.on_tokens(0, token_ids, ())
        failing.on_end(StreamEnd(NoCapacity("the worker was lost"), "w", 0))
        assert [each.choice_index for each in await merger.next()] == [0, 1]
        for _ in range(2):  # it stays failed
            other.on_tokens(0, token_ids, ())
            with pytest.raises(NoCapacity):
                await merger.next()

    run(main())


def test_tokens_with_logprobs_of_all_outputs_together_are_bounded(
    gateway_config: GatewayConfig, model_files: ModelFiles
) -> None:
    async def main() -> None:
        options = {"max_tokens": 64, "num_logprobs": 0}
        outputs = [delivery_of(gateway_config, model_files, **options) for _ in range(20)]
        merger = OutputMerger(outputs)
        for output in outputs:
            output.on_tokens(0, (5,) * 50, (TokenLogprobs(-0.5),) * 50)
            output.on_finish(0, LENGTH)
            output.on_end(StreamEnd(None, "w", 0))
        parts, _ = await read(merger)
        num_tokens = [
            sum(len(each.tokens) for each in part if isinstance(each, TextDelta)) for part in parts
        ]
        assert sum(num_tokens) == 20 * 50
        assert max(num_tokens) < output_merger.MAX_TOKENS + 64

    run(main())


def test_echoed_prompts_count_once(gateway_config: GatewayConfig, model_files: ModelFiles) -> None:
    async def main() -> None:
        outputs = [delivery_of(gateway_config, model_files, max_tokens=8) for _ in range(3)]
        for output in outputs:
            output.echo = Echo("a", [5], [0])
            output.prompt_logprobs = (TokenLogprobs(-0.5),) * output_merger.MAX_TOKENS
        merger = OutputMerger(outputs)
        for num_parts in (3, 1):
            for output in outputs:
                output.on_tokens(0, model_files.tokenizer.encode(["a"]), ())
            parts = [await merger.next() for _ in range(num_parts)]
            assert [*map(len, parts)] == [3 // num_parts] * num_parts

    run(main())


def test_usage_follows_the_outputs(gateway_config: GatewayConfig, model_files: ModelFiles) -> None:
    async def main() -> None:
        outputs = [delivery_of(gateway_config, model_files, max_tokens=8) for _ in range(2)]
        merger = OutputMerger(outputs)
        for number, output in enumerate(outputs, 1):
            output.on_tokens(0, (5,), ())
            await merger.next()
            assert merger.usage.output == number
            assert merger.usage is merger.usage  # not counted again for each chunk

    run(main())
