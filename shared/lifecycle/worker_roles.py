"""The roles of a worker: those whose handlers it has, and those in which it accepts requests.

A worker with both handlers may change its roles. Its handlers stay subscribed, so what runs in a
role that it has left ends as before; only new requests in that role are refused.
"""

from __future__ import annotations

from math import inf

from shared.errors import ConfigError, InvalidRequest, WorkerBusy
from shared.messages import WORKER_ROLES, ChangeRoles, Role, WorkerRole

BOTH = WORKER_ROLES["both"]


def roles_named(name: str, param: str) -> tuple[WorkerRole, ...]:
    """Raises ConfigError."""
    if name not in WORKER_ROLES:
        raise ConfigError(f"{param} {name!r} is none of {', '.join(WORKER_ROLES)}", param=param)
    return WORKER_ROLES[name]


class WorkerRoles:
    """The roles of a worker. The process has handlers of those in `handled`, and announces
    `current`.
    """

    def __init__(self, handled: tuple[Role, ...], announced: tuple[Role, ...] = ()) -> None:
        """Announces `announced`; empty: all. Raises ConfigError for a role without a handler."""
        missing = [role for role in announced if role not in handled]
        if missing:
            raise ConfigError(
                f"announce {missing[0]!r}: this worker has the handlers of {', '.join(handled)} "
                "only",
                param="announce",
            )
        self.handled = handled
        self.current: tuple[Role, ...] = announced or handled
        self._changed_at = -inf

    @property
    def possible(self) -> tuple[WorkerRole, ...]:
        """The roles that ChangeRoles may give; empty: it changes nothing."""
        return BOTH if set(BOTH) <= set(self.handled) else ()

    def check_accepts(self, role: Role) -> None:
        """Raises WorkerBusy for a request in another role: its sender tries the next worker."""
        if role not in self.current:
            raise WorkerBusy(f"this worker does {' and '.join(self.current)} now, not {role}")

    def change(self, command: ChangeRoles, now: float) -> bool:
        """Returns whether the roles have changed. Raises InvalidRequest for a worker without both
        handlers, WorkerBusy within `min_s` after the last change.
        """
        if not self.possible:
            raise InvalidRequest(
                f"this worker has only the handlers of {self.handled[0]}: only one that "
                "`hearth worker` starts changes its roles",
                param="roles",
            )
        roles: tuple[Role, ...] = tuple(role for role in BOTH if role in command.roles)
        if roles == self.current:
            return False
        allowed_in_s = self._changed_at + command.min_s - now
        if allowed_in_s > 0:
            raise WorkerBusy(
                f"this worker changed its roles less than {command.min_s:g} s ago",
                retry_after_s=allowed_in_s,
            )
        self.current, self._changed_at = roles, now
        return True
