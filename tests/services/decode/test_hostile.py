"""Invalid commands, which Hearth's schedulers and decode workers never send."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import msgspec
import pytest

from shared.errors import InvalidRequest, LinkLost
from shared.kv_wire.dialer import Dialer
from shared.messages import Choice, DataPlaneAddress, LinkKey, PrefillAccepted
from shared.sites.kv_targets import targets_for_sites
from shared.subjects import run_prefill
from tests.services.decode.test_handoff import PROMPT, cluster, run_prefill_of
from tests.support.world.clock import run
from tests.support.world.workers import request_of


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"stop_token_ids": tuple(range(1025))}, "stop_token_ids"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": math.nan}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.5}, "min_p"),
        ({"min_p": math.inf}, "min_p"),
    ],
)
def test_invalid_sampling_parameters_are_rejected(sampling: dict[str, Any], param: str) -> None:
    async def main() -> None:
        async with cluster() as it:
            with pytest.raises(InvalidRequest) as raised:
                await it.peer.place("decode-1", request_of(PROMPT, **sampling))
            assert raised.value.param == param
            await it.settled()

    run(main())


def test_oversized_requests_are_rejected_before_unpacking() -> None:
    """A 4 MB message would unpack to more than 1 GB, because each choice holds the prompt."""
    giant = msgspec.structs.replace(
        request_of(PROMPT),
        prompt_token_ids=bytes(4_000_000),
        block_hashes=b"",
        choices=tuple(Choice(choice_index=index) for index in range(128)),
    )
    hashed = msgspec.structs.replace(request_of(PROMPT), block_hashes=bytes(4_000_000))

    async def main() -> None:
        async with cluster() as it:
            tracemalloc.start()
            for request, reason in ((giant, "do not fit"), (hashed, "block hashes")):
                with pytest.raises(InvalidRequest, match=reason):
                    await it.peer.place("decode-1", request)
            assert tracemalloc.get_traced_memory()[1] < 40_000_000
            tracemalloc.stop()
            await it.settled()

    run(main())


def test_push_that_starts_beyond_the_prompt_is_rejected() -> None:
    async def main() -> None:
        async with cluster() as it:
            command = run_prefill_of(it, first_token=41)
            subject = run_prefill("prefill-1")
            with pytest.raises(InvalidRequest, match="first_token 41 is beyond the prompt of 40"):
                await it.decode.bus.request(subject, command, PrefillAccepted, timeout_s=1)
            await it.settled()

    run(main())


def test_gateway_may_pass_on_sealed_targets_of_another_site_alone() -> None:
    """To a prefill worker it is the decode worker: it has checked the addresses."""
    key = LinkKey(key_id=bytes(16), key=bytes(32), security="aead")

    async def main() -> None:
        async with cluster() as it:

            async def run_prefill_for(**fields: object) -> None:
                command = msgspec.structs.replace(
                    run_prefill_of(it), decode_worker_id="gateway-1", **fields
                )
                await it.peer.bus.request(
                    run_prefill("prefill-1"), command, PrefillAccepted, timeout_s=1
                )

            reached = targets_for_sites(it.decode.worker.kv_targets)
            for rejected in (
                {"targets": reached},
                {"targets": reached, "link_key": msgspec.structs.replace(key, security="mac")},
                {"targets": (), "link_key": key},
            ):
                with pytest.raises(InvalidRequest):
                    await run_prefill_for(**rejected)
            await run_prefill_for(targets=reached, link_key=key)
            await it.settled()

    run(main())


@pytest.mark.parametrize(
    ("host", "unix_path"),
    [
        ("nul\0byte", ""),
        ("." * 70, ""),
        ("x" * 250, ""),
        ("127.0.0.1", "nul\0byte"),
        ("127.0.0.1", "/" + "p" * 300),
    ],
)
async def test_invalid_address_raises_link_lost(host: str, unix_path: str) -> None:
    dialer = Dialer(connect_timeout_s=1.0)
    target = DataPlaneAddress(host=host, port=1, unix_path=unix_path, instance_id=b"i")
    with pytest.raises(LinkLost):
        await dialer.link(target)
    await dialer.close()
