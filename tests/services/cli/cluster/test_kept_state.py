"""`hearth up --state`: a cluster that is killed, and goes on with its records and secrets."""

import asyncio
import os
import re
import signal
import stat
from pathlib import Path

import pytest

from tests.services.cli.cluster.running_up import Up
from tests.services.cli.in_process import call_hearth
from tests.support.services.running import (
    WAIT_S,
    cluster_of,
    complete,
    environ_for,
    eventually,
    records_of,
    start_hearth,
)


@pytest.mark.long
def test_next_start_goes_on_with_tenants_keys_usage_and_ports(
    tmp_path: Path, chat_model: Path
) -> None:
    folder, home = tmp_path / "kept", tmp_path / "home"
    options = ("--state", str(folder), "--model", str(chat_model), "--role", "both")
    environ = environ_for(home)
    first = Up(home, *options, HEARTH_API_KEY="a-key-of-mine")
    assert first.state.api_key == "a-key-of-mine"
    added = call_hearth(("tenant", "add", "acme"), environ)
    key = added.stdout.split()[-1]
    assert call_hearth(("model", "alias", "fast", first.state.model_name), environ).returncode == 0
    assert call_hearth(("credential", "decode", "--process-id", "far"), environ).returncode == 0
    assert complete(first.state.url, key)["usage"]["completion_tokens"] == 8
    redis = first.state.redis_url
    eventually(lambda: "requests=1, input" in str(asyncio.run(records_of(redis, ("acme",)))), "use")
    _, before = cluster_of(home) or pytest.fail("the cluster is not running")
    first.stop(signal.SIGKILL)

    second = Up(home, *options)
    try:
        assert (second.state, second.directory.resolve()) == (before, folder)
        assert complete(second.state.url, key)["usage"]["completion_tokens"] == 8
        assert "fast" in call_hearth(("model", "aliases", "--tenant", "acme"), environ).stdout
        assert complete(second.state.url, "a-key-of-mine")["usage"]["completion_tokens"] == 8
        usage = call_hearth(("usage", "--tenant", "acme"), environ).stdout
        assert re.search(r"acme +\S+ +[12] ", usage), usage  # those before the kill, at least
        shown = call_hearth(("tenant", "show", "default"), environ).stdout
        assert shown.count("at the start") == 1, shown
        refused = start_hearth(home, "up", *options)
        output, _ = refused.communicate(timeout=WAIT_S)
        pid = second.process.pid
        assert output == f"hearth: --state {folder} is in use by `hearth up` (process {pid})\n"
        assert refused.returncode == 2
    finally:
        second.stop()
    assert {each.name for each in folder.iterdir()} >= {"kept.json", "lock", "logs"}
    assert not {each.name for each in folder.iterdir()} & {"cluster.json", "nats.conf", "tmp"}
    for path in (folder, *folder.rglob("*")):
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
