from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.nats_urls import nats_servers, user_of, without_password


@pytest.mark.parametrize(
    ("text", "urls", "user", "password"),
    [
        ("nats://d-1:word@a:4222", ["nats://a:4222"], "d-1", "word"),
        ("nats://a", ["nats://a"], None, None),
        ("nats://d-1:word@a:1,nats://b:2", ["nats://a:1", "nats://b:2"], "d-1", "word"),
        ("tls://a, tls://d-1:word@b", ["tls://a", "tls://b"], "d-1", "word"),
        ("nats://u:w@a,nats://u:w@b", ["nats://a", "nats://b"], "u", "w"),
        ("nats://u:w,rd@a,nats://b", ["nats://a", "nats://b"], "u", "w,rd"),
        ("nats://token@a,nats://b", ["nats://token@a", "nats://token@b"], None, None),
        ("nats://u:w@[::1]:4222", ["nats://[::1]:4222"], "u", "w"),
    ],
)
def test_servers_share_one_credential(
    text: str, urls: list[str], user: str | None, password: str | None
) -> None:
    assert nats_servers(text) == (urls, user, password, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nats://u:w@a,nats://v:w@b", "two credentials"),
        ("nats://a,tls://b", "mixes"),
        ("nats://a,http://b", "must start with nats:// or tls://"),
        ("nats://a:port,nats://b", "port"),
        ("nats://a,b:4222", "no server"),
        ("nats://u:w@,nats://b", "no server"),
        ("", "must start with"),
    ],
)
def test_invalid_list_is_rejected_without_showing_a_password(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        nats_servers(text)
    assert ":w" not in raised.value.message


def test_user_is_that_of_any_url() -> None:
    assert user_of("nats://a,nats://d-1:word@b") == "d-1"
    assert user_of("nats://a,nats://b") is None


def test_url_is_shown_without_password() -> None:
    assert without_password("nats://user:secret@host:4222/x?token=y") == "nats://host:4222/x"
    assert without_password("nats://u:w@a:1, nats://u:w@b:2") == "nats://a:1,nats://b:2"
