"""Services that receive wrong messages from each other while they work.

For any messages, each request ends once, no handler raises an unexpected exception, nothing is left
behind, and an unmodified request gets its usual response, at the same time and afterwards.
"""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.output.events import TextDelta
from services.gateway.request.request_output import RequestOutput
from services.gateway.text.model_files import ModelFiles
from shared.errors import NoCapacity, Overloaded
from tests.fuzz.fleet import fleet
from tests.fuzz.meddler import Meddler, Plan, plans
from tests.fuzz.profile import fuzz
from tests.support.services.model_dir import write_model_dir
from tests.support.world.clock import run

RUNNING: dict[str, Any] = {"max_tokens": 60, "num_choices": 2}
SPARED = "spared"


@cache
def files() -> tuple[Path, ModelFiles]:
    directory = write_model_dir(Path(tempfile.mkdtemp()) / "timing")
    return directory, ModelFiles(directory)


def text_of(output: RequestOutput) -> str:
    return "".join(each.text for each in output.take() if isinstance(each, TextDelta))


@cache
def undisturbed() -> str:
    async def main() -> str:
        async with fleet(*files()) as it:
            output = await it.open(SPARED, max_tokens=40, tenant_id=SPARED)
            assert await it.ended(output) is None
            return text_of(output)

    return run(main())


@fuzz(6)
@given(plans, st.data())
def test_services_survive_wrong_messages(plan: Plan, data: st.DataObject) -> None:
    async def main() -> None:
        async with fleet(*files()) as it:
            meddler = Meddler(it.network, plan, data.draw, SPARED)
            meddled = [await it.open(name, **RUNNING) for name in ("first", "second")]
            spared = await it.open(SPARED, max_tokens=40, tenant_id=SPARED)
            for each in meddled:
                await it.ended(each)
                assert each.num_output_tokens <= RUNNING["max_tokens"] * RUNNING["num_choices"]
            check(spared, await it.ended(spared))
            meddler.stop()
            await it.settled()
            again = await it.open("again", max_tokens=40, tenant_id=SPARED)
            assert await it.ended(again) is None
            assert text_of(again) == undisturbed()
            await it.settled()
        if meddler.exhausted is not None:
            raise meddler.exhausted

    expected = undisturbed()

    def check(output: RequestOutput, error: Exception | None) -> None:
        """Other messages may have reported a lack of capacity; the output is never wrong."""
        assert error is None or isinstance(error, NoCapacity | Overloaded), error
        if error is None:
            assert text_of(output) == expected

    run(main())
