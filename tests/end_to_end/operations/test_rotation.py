"""A stream goes on while secrets, passwords, tokens and certificates are replaced, as rotation.md
tells it, in a cluster of real processes over TLS.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from cryptography import x509

from tests.support.cluster.chaos_cluster import DEMO_MODEL_NAME, ChaosCluster
from tests.support.cluster.service_processes import OPERATOR_TOKEN
from tests.support.guide_blocks import FOLDER, blocks_of
from tests.support.servers import Server, find_binary, free_port
from tests.support.waiting import until

SERVICES = ("kv_index-1", "scheduler-1", "decode-1", "gateway-1")
WITH_SECRET = ("kv_index-1", "gateway-1")
STEP_S = 0.01
NUM_TOKENS = 7000  # a minute at least: more than the rotations take
NUM_MORE = 20  # events after a rotation
BODY = {
    "model": DEMO_MODEL_NAME,
    "messages": [{"role": "user", "content": "What is a block?"}],
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": NUM_TOKENS,
    "stream": True,
}
TLS = next(each.text for each in blocks_of(FOLDER / "several_hosts.md") if each.mark == "run: tls")
ISSUE = TLS[TLS.index("issue()") : TLS.index("issue server")]
ROTATIONS = {
    each.mark.removeprefix("run: rotation").strip(): each.text
    for each in blocks_of(FOLDER / "rotation.md")
    if each.mark.startswith("run: rotation")
}


class RotatedCluster(ChaosCluster):
    """A cluster whose secrets are in files, and whose NATS and gateway have TLS."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder,
            step_s=STEP_S,
            services=SERVICES,
            worker_options={"kv-cache-bytes": str(1024 * 256), "max-batch-tokens": "256"},
        )
        self.urls = {name: url.replace("http:", "https:") for name, url in self.urls.items()}
        self._port = free_port()
        self._prepare()

    def run(self, text: str) -> str:
        """Runs commands of the guide in the folder, after those that define its functions."""
        text = text.replace("10.0.0.1", "127.0.0.1").replace("4222", str(self._port))
        path = f"{Path(sys.executable).parent}:{Path(find_binary('nats-server')).parent}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.folder,
            env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{text}\n{done.stderr}"
        return done.stdout

    def rotate(self, name: str, line: int | None = None) -> None:
        """Runs a block of the guide, or one line of it."""
        block = ROTATIONS[name]
        self.run(f"{ISSUE}{ROTATIONS['']}{block if line is None else block.splitlines()[line]}")

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=str(self.folder / "tls/ca.crt"))

    def client(self, token: str = "", **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=self.urls["gateway-1"],
            headers={"authorization": f"Bearer {token or self.api_key}"},
            verify=self.context(),
            trust_env=False,
            timeout=60,
            **options,
        )

    def num_logged(self, name: str, event: str) -> int:
        return self.log_of(name).count(f'"event": "{event}"')

    def text_of(self, name: str) -> str:
        return (self.folder / "secrets" / name).read_text()

    async def serial(self) -> int:
        """Returns the number of the gateway's certificate for a new connection."""
        port = int(self.urls["gateway-1"].rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=self.context())
        found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return x509.load_der_x509_certificate(found).serial_number

    # ── as a reader of the guide has it ──────────────────────────────────────────────────────────

    def _prepare(self) -> None:
        self.run(TLS)
        self.run(ISSUE + "\n".join(f"issue {name} DNS:{name}" for name in SERVICES))
        secrets = self.folder / "secrets"
        secrets.mkdir()
        (secrets / "cluster-secret").write_text("of the cluster\n")
        (secrets / "operator-token").write_text(f"{OPERATOR_TOKEN}\n")
        passwords = ""
        for name in SERVICES:
            url = f"tls://{name}:first@127.0.0.1:{self._port}\n"
            (secrets / f"{name}.url").write_text(url)
            variable = f"HEARTH_{name.upper().replace('-', '_')}_PASSWORD"
            passwords += f'{variable}: "first"\n'
        (self.folder / "passwords.conf").write_text(passwords)
        self.run(ROTATIONS["nats"])

    def _nats(self) -> Server:
        files = ["-c", str(self.folder / "nats.conf"), "-P", str(self.folder / "nats.pid")]
        return Server([find_binary("nats-server"), *files], self._port)

    async def _missing(self, client: httpx.AsyncClient) -> set[str]:
        async with self.client(OPERATOR_TOKEN) as own:
            return await super()._missing(own)

    def _environ(self, name: str) -> dict[str, str]:
        environ = super()._environ(name)
        del environ["HEARTH_NATS_URL"]
        files = {"NATS_URL_FILE": f"secrets/{name}.url", "NATS_CA": "tls/ca.crt"}
        files |= {"NATS_CERT": f"tls/{name}.crt", "NATS_KEY": f"tls/{name}.key"}
        if name in WITH_SECRET:
            files["CLUSTER_SECRET_FILE"] = "secrets/cluster-secret"
        if name == "gateway-1":
            files["OPERATOR_TOKEN_FILE"] = "secrets/operator-token"
            files |= {"HTTP_CERT": "tls/server.crt", "HTTP_KEY": "tls/server.key"}
        return environ | {f"HEARTH_{each}": str(self.folder / p) for each, p in files.items()}

    def _arguments(self, name: str) -> list[str]:
        arguments = super()._arguments(name)
        if "--operator-token" in arguments:  # it is in a file
            at = arguments.index("--operator-token")
            del arguments[at : at + 2]
        return arguments


class OpenStream:
    """A streamed answer, read as it comes."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.deltas: list[str] = []
        self.failure = ""
        self._http = http
        self.task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=BODY) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        self._take(msgspec.json.decode(line.removeprefix("data: ")))
        except httpx.HTTPError as error:
            self.failure = repr(error)

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.failure = str(event)
        self.deltas += [each["delta"].get("content") or "" for each in event.get("choices") or ()]

    async def go_on(self, num_events: int = NUM_MORE) -> None:
        """Waits for so many further events."""
        wanted = len(self.deltas) + num_events
        await until(lambda: len(self.deltas) >= wanted or self.task.done())
        assert len(self.deltas) >= wanted, f"it has ended: {self.failure or 'in order'}"

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RotatedCluster]:
    cluster = RotatedCluster(tmp_path)
    try:
        await cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.long
async def test_stream_goes_on_through_each_rotation(cluster: RotatedCluster) -> None:
    async with cluster.client() as http:
        stream = OpenStream(http)
        await stream.go_on()
        for rotation in (_certificates, _password, _cluster_secret, _operator_token):
            await rotation(cluster)
            await stream.go_on()
        text = stream.text
        await stream.close()
        again = OpenStream(http)
        await until(lambda: len(again.text) >= len(text) or again.task.done())
        assert again.text.startswith(text), again.failure
        await again.close()


async def _certificates(cluster: RotatedCluster) -> None:
    before = await cluster.serial()
    cluster.rotate("certificates")
    await until(lambda: _is_other(cluster, before))


async def _is_other(cluster: RotatedCluster, serial: int) -> bool:
    return await cluster.serial() != serial


async def _password(cluster: RotatedCluster) -> None:
    """The process connects again, with the certificate that has just been replaced."""
    before = cluster.num_logged("decode-1", "nats_reconnected")
    cluster.rotate("password")
    await until(lambda: cluster.num_logged("decode-1", "nats_reconnected") > before)
    assert "first" not in cluster.text_of("decode-1.url")
    assert cluster.num_logged("decode-1", "nats_files_read")


async def _cluster_secret(cluster: RotatedCluster) -> None:
    num_read = {each: cluster.num_logged(each, "option_file_read") for each in WITH_SECRET}
    async with cluster.client() as http:
        keys = [await _keys(http)]
        for line in range(3):
            cluster.rotate("cluster-secret", line)
            await until(lambda: _keys_differ(http, keys[-1]))
            keys.append(await _keys(http))
    old, added, used, ended = keys
    assert added == [*old, added[1]]
    assert used == [added[1], *old]
    assert ended == [added[1]]
    await until(
        lambda: all(
            cluster.num_logged(each, "option_file_read") > before
            for each, before in num_read.items()
        )
    )


async def _keys(http: httpx.AsyncClient) -> list[str]:
    return [each["kid"] for each in (await http.get("/v1/receipts/keys")).json()["keys"]]


async def _keys_differ(http: httpx.AsyncClient, keys: list[str]) -> bool:
    return await _keys(http) != keys


async def _operator_token(cluster: RotatedCluster) -> None:
    assert await _admits(cluster, OPERATOR_TOKEN)
    cluster.rotate("operator-token", 0)
    new = cluster.text_of("operator-token").split()[1]
    await until(lambda: _admits(cluster, new))
    assert await _admits(cluster, OPERATOR_TOKEN)
    cluster.rotate("operator-token", 1)
    cluster.rotate("operator-token", 2)
    await until(lambda: _rejects(cluster, OPERATOR_TOKEN))
    assert await _admits(cluster, new)


async def _admits(cluster: RotatedCluster, token: str) -> bool:
    async with cluster.client(token) as http:
        return (await http.get("/v1/cluster")).status_code == 200


async def _rejects(cluster: RotatedCluster, token: str) -> bool:
    async with cluster.client(token) as http:
        return (await http.get("/v1/cluster")).status_code == 401
