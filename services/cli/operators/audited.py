"""Records operators' commands."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from socket import gethostname
from typing import Any, ParamSpec, TypeVar

from shared.errors import HearthError

DONE = "done"
P = ParamSpec("P")
T = TypeVar("T")


def audited(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Records the end of an operator's command `name`, also if it fails.

    If Redis does not take the record of a command that has changed something,
    standard error says so.
    """

    def decorate(command: Callable[P, T]) -> Callable[P, T]:
        parameters = signature(command)

        @wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            outcome = "failed"
            try:
                result = command(*args, **kwargs)
                outcome = DONE
                return result
            except HearthError as error:
                outcome = error.code
                raise
            finally:
                _record(name, parameters.bind(*args, **kwargs).arguments, outcome)

        return run

    return decorate


def _record(name: str, given: Mapping[str, Any], outcome: str) -> None:
    from services.cli.output import with_store
    from shared.tenancy import audit

    redis_url = given.get("redis_url") or os.environ.get("HEARTH_REDIS_URL")
    others = {name: value for name, value in given.items() if name != "changes"}
    arguments = audit.shown_arguments(others, given.get("changes") or {})
    try:
        with_store(
            redis_url,
            lambda store: audit.record(
                store, who=_who(), command=name, arguments=arguments, outcome=outcome
            ),
        )
    except HearthError as error:
        if outcome == DONE:  # any other outcome has its own error
            print(f"note: this command is not in the audit: {error.message}", file=sys.stderr)


def _who() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        user = str(os.getuid())
    return f"{user}@{gethostname()}"
