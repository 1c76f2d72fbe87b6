"""Makes Redis users on a running server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import redis

from services.cli.output import TIMEOUT_S, find_redis
from shared.errors import DependencyUnavailable
from shared.store import tls_options
from shared.tls import TlsFiles


def set_users(redis_url: str | None, rules: Mapping[str, Sequence[str]]) -> None:
    """Sets users by rules of ACL SETUSER. Raises ConfigError, and DependencyUnavailable if Redis
    does not take one, as from a user that may not.
    """
    url = find_redis(redis_url)
    is_encrypted = url.startswith("rediss://")
    options = tls_options(TlsFiles.of_environ("REDIS", os.environ)) if is_encrypted else {}
    client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, **options)
    try:
        for user, each in rules.items():
            client.execute_command("ACL", "SETUSER", user, *each)
    except (redis.exceptions.RedisError, OSError) as error:
        raise DependencyUnavailable(f"Redis takes no users: {error}") from None
    finally:
        client.close()
