"""The clusters that several_hosts.md and README.md tell to start: with TLS on one host, and with a
worker on a second one.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.end_to_end.guides.two_hosts import Host, has_networks, linked_networks
from tests.support.guide_blocks import FOLDER, ROOT, blocks_of
from tests.support.servers import free_port
from tests.support.services.running import LAST_LINE, eventually, read_until

LIMIT_S = 400
GUIDE = FOLDER / "several_hosts.md"
SERVED = "https://10.0.0.1:8443"
WAIT = f"""
until curl -s --cacert tls/ca.crt {SERVED}/ready | grep '"ready":true'; do sleep 1; done
curl -sS --cacert tls/ca.crt {SERVED}/v1/completions -H "x-api-key: $(tail -1 key)" \\
  -H 'Content-Type: application/json' -d '{{"prompt": "What is a block?", "max_tokens": 8}}'
"""
HOSTS = ("10.0.0.1", "10.0.0.2")  # A and B
PORTS = ("4222", "6379", "8443", "7700", "8000", "9464")
LONG_PROMPT = 'hearth chat --system "$(cat services/client/first_prompt.txt)" "What is Hearth?"'
BEGIN = "trap 'kill $(jobs -p); wait' EXIT"


@pytest.mark.long
def test_processes_with_tls_answer(tmp_path: Path) -> None:
    for name in ("shared", "services"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["timeout", str(LIMIT_S), "bash", "-c", on_this_host(script())],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "HOME": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert '"ready":true' in done.stdout, done.stderr
    assert '"finish_reason":"length"' in done.stdout, f"{done.stdout}\n{done.stderr}"
    assert all(f"{role} " in done.stdout for role in ("prefill", "decode", "scheduler"))


def script() -> str:
    """Returns the guide's blocks; those of host B run in a shell of their own."""
    parts = []
    for block in blocks_of(GUIDE):
        if block.mark == "run: tls elsewhere":
            parts.append(f"(\n{block.text}) &\n{WAIT}")
        elif block.mark == "run: tls":
            parts.append(block.text.replace("tenant add team-a ", "tenant add team-a > key "))
    return "\n".join([BEGIN, *parts])


def on_this_host(text: str) -> str:
    for host in HOSTS:
        text = text.replace(host, "127.0.0.1")
    for port in PORTS:
        text = text.replace(port, str(free_port()))
    return text


@pytest.mark.long
@pytest.mark.parametrize("guide", [ROOT / "README.md", GUIDE], ids=lambda path: path.stem)
def test_worker_of_a_second_host_joins_and_answers(guide: Path, tmp_path: Path) -> None:
    """Word by word, each host in a network of its own, with the ports of the guide alone."""
    if not has_networks():
        pytest.skip("this user may not make network namespaces")
    with linked_networks(*HOSTS, hidden=tmp_path / "b") as (in_a, in_b):
        a, b = Host(tmp_path / "a", in_a), Host(tmp_path / "b", in_b)
        with second_host(host_commands(guide), a, b):
            assert ports_between(b.run("cat /proc/net/tcp").stdout) == {4222, 7700}


@pytest.mark.long
def test_worker_with_another_credential_joins_on_loopback(tmp_path: Path) -> None:
    """The commands of README.md, with addresses and ports of this machine."""
    commands = on_this_host("\n".join(host_commands(ROOT / "README.md"))).splitlines()
    with second_host(commands, Host(tmp_path / "a"), Host(tmp_path / "b")):
        pass


def host_commands(guide: Path) -> list[str]:
    """Returns the commands of both hosts, each in a line without its comment."""
    text = "".join(each.text for each in blocks_of(guide) if each.mark == "run: hosts")
    return [re.sub(r"\s+#.*", "", line) for line in re.sub(r"\\\n\s*", "", text).splitlines()]


@contextlib.contextmanager
def second_host(commands: list[str], a: Host, b: Host) -> Iterator[None]:
    """Runs a cluster on host A and a decode worker on B, which answers alone, until the block
    ends: with a prompt that is computed on A, whose KV is pushed to B.
    """
    up, credential, *of_b = commands
    with stopped(a.start(up)) as cluster:
        read_until(cluster, LAST_LINE)
        url = a.run(credential).stdout.strip()
        name = urlsplit(url).username
        of_b = [re.sub(r"(?<=HEARTH_NATS_URL=)\S*…\S*", url, each) for each in of_b]
        for each in (each for each in of_b if each.startswith("export ")):
            variable, _, value = each.removeprefix("export ").partition("=")
            b.environ[variable] = value
        decode = next(each for each in of_b if "hearth decode" in each)
        with stopped(b.start(decode)):
            ready = re.compile(rf"^{name}.* ready *$", re.MULTILINE)
            eventually(lambda: ready.search(a.run("hearth status", check=False).stdout), name)
            for each in (each for each in of_b if each.startswith("curl ")):
                assert b.run(each).stdout == "ready\n"
            a.run("hearth drain decode-1 --force")
            answer = a.run(LONG_PROMPT)
            assert "Hearth is" in answer.stdout
            assert f"prefill prefill-1 · decode {name}" in answer.stderr
            yield


@contextlib.contextmanager
def stopped(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Stops a process in order when the block ends."""
    try:
        yield process
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output


def ports_between(connections: str) -> set[int]:
    """Returns at which ports of the guide the host has open connections to another host; of others
    both ends. `connections`: /proc/net/tcp.
    """
    ports: set[int] = set()
    for line in connections.splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == "01" and not local.startswith("0100007F"):  # open, and not of 127.0.0.1
            ends = {int(each.partition(":")[2], 16) for each in (local, remote)}
            ports |= ends & {int(each) for each in PORTS} or ends
    return ports
