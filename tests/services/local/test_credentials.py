import re

import pytest

from services.cli.cluster.credential_commands import nats_config as print_nats_config
from services.local.credentials import (
    Credential,
    named_credentials,
    nats_config,
    nats_config_with_variables,
    process_id_for,
    role_of,
)
from shared.errors import ConfigError
from shared.subjects import random_instance


def test_every_credential_has_its_own_password() -> None:
    first, second = Credential("decode", "decode-1"), Credential("decode", "decode-2")
    assert first.password != second.password
    assert len(first.password) == 32
    assert first.nats_url("10.0.0.5", 4222) == f"nats://decode-1:{first.password}@10.0.0.5:4222"


def test_config_names_every_process_with_its_own_password() -> None:
    credentials = [Credential("decode", "decode-1"), Credential("prefill", "prefill-1")]
    text = nats_config(credentials, host="127.0.0.1", port=4321)
    assert 'listen: "127.0.0.1:4321"' in text
    for each in credentials:
        assert f'user: "{each.process_id}", password: "{each.password}"' in text


def test_password_variables_are_unquoted() -> None:
    """nats-server replaces only unquoted variables by values of its environment."""
    text = nats_config_with_variables(
        [Credential("prefill", "prefill-gpu")], host="0.0.0.0", port=4222
    )
    assert 'user: "prefill-gpu", password: $HEARTH_PREFILL_GPU_PASSWORD, ' in text


def test_url_user_is_the_process_id() -> None:
    url = "nats://decode-7:word@host:4222"
    assert process_id_for("decode", url, instance="-") == "decode-7"
    assert process_id_for("decode", url, instance="a") == "decode-7.a"
    assert process_id_for("decode", url, credential="other", instance="-") == "other"
    replicas = {process_id_for("decode", url) for _ in range(2)}
    assert len(replicas) == 2
    assert all(re.fullmatch(r"decode-7\.[0-9a-f]{12}", each) for each in replicas)
    name = process_id_for("decode", "nats://host:4222", instance="-")
    assert re.fullmatch(r"decode-[0-9a-f]{12}", name)


def test_roles_are_parsed_with_dash_or_underscore() -> None:
    assert role_of("kv-index") == role_of("kv_index") == "kv_index"
    named = named_credentials(["kv-index=kv-1", "worker=w@eu"])
    assert [(each.role, each.process_id, each.region) for each in named] == [
        ("kv_index", "kv-1", ""),
        ("worker", "w", "eu"),
    ]


@pytest.mark.parametrize(
    "argument", ["decode", "decode=", "=x", "router=r-1", "decode=@eu", "decode=x@e.u"]
)
def test_invalid_role_argument_is_rejected(argument: str) -> None:
    with pytest.raises(ConfigError):
        named_credentials([argument])


@pytest.mark.parametrize(
    "arguments",
    [
        ['decode=a"b'],
        ["decode=a.b"],
        ["decode=é"],
        ["decode=x", "decode=x"],
        ["decode=a-b", "prefill=a_b"],
    ],
)
def test_invalid_or_duplicate_names_are_rejected(arguments: list[str]) -> None:
    with pytest.raises(ConfigError):
        named_credentials(arguments)


def test_tls_block_follows_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    print_nats_config(["decode=decode-1"], host="127.0.0.1", port=4222, tls="/etc/nats/tls")
    first, *_ = text = capsys.readouterr().out.splitlines()
    assert first.endswith("--host 127.0.0.1 --port 4222 --tls /etc/nats/tls")
    assert text[text.index("tls {") :] == [
        "tls {",
        '  cert_file: "/etc/nats/tls/server.crt"',
        '  key_file: "/etc/nats/tls/server.key"',
        '  ca_file: "/etc/nats/tls/ca.crt"',
        "  verify: true",
        '  handshake_first: "auto"',
        "}",
    ]


def test_workers_of_two_hosts_have_other_ids() -> None:
    """100 hosts of one worker credential: 48 bits leave 2e-11 for any two of them."""
    runs = {random_instance() for _ in range(10_000)}
    assert len(runs) == 10_000
    assert {len(bytes.fromhex(each)) for each in runs} == {6}


def test_classes_are_in_the_head_and_in_the_permissions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = ["decode=d-fr@fr", "decode=d-us@us", "gateway=g@de"]
    print_nats_config(names, host="h", port=4222, region_class=["eu=fr,de", "us=us"])
    head, setting, *rest = capsys.readouterr().out.splitlines()
    assert head.endswith(" --class eu=de,fr --class us=us")
    assert setting == "# each process: HEARTH_REGION_CLASSES='eu=de,fr us=us'"
    users = "\n".join(rest).split("user: ")[1:]
    classes = {
        each.split('"')[1]: set(re.findall(r"hearth\.v1\.in\.(\w+)\.", each)) for each in users
    }
    assert classes == {"d-fr": {"eu"}, "d-us": {"us"}, "g": {"eu"}, "g.api": set()}


@pytest.mark.parametrize(
    ("classes", "problem"),
    [
        (["eu=fr,mars"], "'mars', which is the region of no process and no link here"),
        (["eu=fr", "eu=fr"], "region class 'eu' is declared twice"),
        (["eu"], "region class 'eu' is not NAME=REGION"),
    ],
)
def test_bad_classes_have_one_line(classes: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        print_nats_config(["decode=d@fr"], host="h", port=4222, region_class=classes)
    assert problem in raised.value.message and "\n" not in raised.value.message
