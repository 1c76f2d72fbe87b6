"""Heartbeats of a newer release, whose roles, states and cards this one does not know."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from shared.messages import Heartbeat, HostedModel, HostLoad, IndexLoad, StartDecode
from shared.transport.decoding.newer_values import announcement_decoder
from tests.support.records import model_card

HEARTBEAT = Heartbeat(
    process_id="decode-1",
    epoch=7,
    sequence_number=3,
    roles=("decode",),
    state="ready",
    interval_s=0.25,
    region="eu",
    model=model_card(),
    possible_roles=("prefill", "decode"),
)


def of_newer_release(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(
        {**msgspec.to_builtins(HEARTBEAT, builtin_types=(bytes,)), **changes}
    )


def read(**changes: Any) -> Heartbeat:
    return announcement_decoder(Heartbeat)(of_newer_release(**changes))


def test_heartbeat_of_this_release_is_read_as_it_is() -> None:
    assert announcement_decoder(Heartbeat)(msgspec.msgpack.encode(HEARTBEAT)) == HEARTBEAT


@pytest.mark.parametrize(
    "sent, expected",
    [
        ({"seconds_to_live": 5, "deeper": {"of": ["it"]}}, {}),
        ({"roles": ["translate", "decode"]}, {"roles": ("decode",)}),
        ({"possible_roles": ["translate"]}, {"possible_roles": ()}),
        ({"state": "hibernating"}, {"state": "starting"}),
        ({"index": {"type": "IndexLoad", "state": "rebuilt"}}, {"index": None}),
        (
            {"roles": ["translate", "decode"], "state": "hibernating"},
            {"state": "starting"},
        ),
    ],
)
def test_unknown_values_are_left_out(sent: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read(**sent) == msgspec.structs.replace(HEARTBEAT, **expected)


def test_card_with_unknown_numerics_is_no_card() -> None:
    """It may not pass for one that names none, as its bits may differ."""
    card = msgspec.to_builtins(model_card(), builtin_types=(bytes,))
    card["numerics"] = ["certified", *card["numerics"][1:]]
    assert read(model=card) == msgspec.structs.replace(HEARTBEAT, model=None)


def test_host_with_a_model_in_an_unknown_state_announces_none() -> None:
    models = tuple(
        HostedModel(name=name, revision="r", state="hot", device="cpu") for name in ("a", "b")
    )
    load = msgspec.to_builtins(HostLoad(devices=(), models=models))
    assert read(host=load).host == HostLoad(devices=(), models=models)
    load["models"][0]["state"] = "hibernating"
    assert read(host=load).host is None


def test_process_without_a_known_role_is_not_read() -> None:
    with pytest.raises(msgspec.ValidationError, match="roles"):
        read(roles=["translate"])


@pytest.mark.parametrize("changes", [{"roles": 7}, {"sequence_number": -1}, {"roles": [7]}])
def test_invalid_heartbeat_is_not_read(changes: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        read(**changes)


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode([1, 2])])
def test_other_bytes_are_not_read(data: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        announcement_decoder(Heartbeat)(data)


def test_command_with_an_unknown_value_is_not_read() -> None:
    """Its sender would believe that it is obeyed."""
    data = msgspec.msgpack.encode({"type": "StartDecode", "roles": ["translate"]})
    with pytest.raises(msgspec.ValidationError):
        announcement_decoder(StartDecode)(data)


def test_index_is_read() -> None:
    """The case above is unknown by its value alone."""
    index = msgspec.to_builtins(IndexLoad(state="exact"))
    assert read(index=index).index == IndexLoad(state="exact")
