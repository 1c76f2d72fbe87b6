"""Makes Redis users on a running server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence

import redis.exceptions

from services.cli.output import TIMEOUT_S, find_redis
from shared.errors import DependencyUnavailable
from shared.store import redis_client
from shared.tls import TlsFiles


def set_users(redis_url: str | None, rules: Mapping[str, Sequence[str]]) -> None:
    """Sets users by rules of ACL SETUSER. Raises ConfigError, and DependencyUnavailable if Redis
    does not take one, as from a user that may not.
    """
    asyncio.run(_set_users(find_redis(redis_url), rules))


async def _set_users(url: str, rules: Mapping[str, Sequence[str]]) -> None:
    tls = TlsFiles.of_environ("REDIS", os.environ)
    client = redis_client(url, tls, socket_timeout=TIMEOUT_S)
    try:
        for user, each in rules.items():
            await client.execute_command("ACL", "SETUSER", user, *each)
    except (redis.exceptions.RedisError, OSError) as error:
        raise DependencyUnavailable(f"Redis takes no users: {error}") from None
    finally:
        await client.aclose()
