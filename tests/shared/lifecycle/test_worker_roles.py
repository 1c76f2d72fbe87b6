"""Which roles a worker may take, and when it refuses a change."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError, InvalidRequest, WorkerBusy
from shared.lifecycle.worker_roles import BOTH, WorkerRoles, roles_named
from shared.messages import ChangeRoles, WorkerRole


def test_worker_announces_what_it_was_started_with_and_then_what_it_was_given() -> None:
    roles = WorkerRoles(BOTH, ("prefill",))
    assert (roles.current, roles.possible) == (("prefill",), BOTH)
    assert roles.change(ChangeRoles(roles=("decode", "prefill")), now=1.0)
    assert roles.current == BOTH
    assert not roles.change(
        ChangeRoles(
            roles=(
                "prefill",
                "decode",
            )
        ),
        now=2.0,
    )
    roles.check_accepts("decode")
    assert roles.change(ChangeRoles(roles=("prefill",)), now=3.0)
    with pytest.raises(WorkerBusy, match="does prefill now, not decode"):
        roles.check_accepts("decode")


def test_change_soon_after_another_is_refused_with_a_time() -> None:
    roles = WorkerRoles(BOTH)
    roles.change(ChangeRoles(roles=("decode",), min_s=10.0), now=0.0)
    with pytest.raises(WorkerBusy) as refusal:
        roles.change(ChangeRoles(roles=("prefill",), min_s=10.0), now=4.0)
    assert refusal.value.retry_after_s == 6.0
    assert not roles.change(ChangeRoles(roles=("decode",), min_s=10.0), now=4.0)  # has it already
    assert roles.change(ChangeRoles(roles=("prefill",), min_s=10.0), now=10.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_worker_with_one_handler_changes_nothing(role: WorkerRole) -> None:
    roles = WorkerRoles((role,))
    assert roles.possible == ()
    with pytest.raises(InvalidRequest, match=f"only the handlers of {role}"):
        roles.change(ChangeRoles(roles=BOTH), now=0.0)
    with pytest.raises(ConfigError, match="announce"):
        WorkerRoles((role,), BOTH)


def test_unknown_name_of_roles_is_one_clear_line() -> None:
    assert roles_named("both", "roles") == BOTH
    with pytest.raises(ConfigError, match="roles 'all' is none of prefill, decode, both"):
        roles_named("all", "roles")
