"""The tokens that wait for the gateway of another site."""

from __future__ import annotations

import msgspec

from services.gateway.sites.site_placements import SitePlacements
from shared.messages import Choice, StartDecode, TokenLogprobs
from tests.services.scheduler.literals import submit_of


def test_prompt_logprobs_are_sent_once() -> None:
    """They take megabytes, and are the same for all choices."""
    made = submit_of("r", gateway_id="b/gw").request
    choices = tuple(Choice(choice_index=index) for index in range(3))
    command = StartDecode(
        placement_id=b"p" * 16, request=msgspec.structs.replace(made, choices=choices)
    )
    placements = SitePlacements(lambda: None)
    receiver = placements.open(command, command.request, "a/gw/00ff", 0.0)
    receiver.on_prompt_logprobs([TokenLogprobs(logprob=-1.0)] * 4)
    for index in range(3):
        receiver.on_tokens(index, [1], [])
    ((_, _, entries),) = placements.take(0.0)
    assert [len(each.prompt_logprobs) for each in entries] == [4, 0, 0]
