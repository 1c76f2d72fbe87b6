"""`hearth up` with a certificate, and with a base model."""

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from rich.console import Console

from services.cli.cluster import up
from services.cli.cluster.up import curl_target, own_command
from services.local.readiness import wait_until_ready
from shared.clock import MonotonicClock
from tests.services.cli.in_process import call_hearth
from tests.support.certificates import Authority
from tests.support.servers import free_port
from tests.support.services.running import WAIT_S, environ_for, start_hearth

COMMAND = re.compile(r"^[\w' ]+:\n(.+)$", re.MULTILINE)  # below the name of an API


@pytest.fixture
def base_model(chat_model: Path, tmp_path: Path) -> Path:
    """The chat model without its template."""
    folder = Path(shutil.copytree(chat_model, tmp_path / "base"))
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.long
def test_check_of_a_base_model_over_https_completes_texts(tmp_path: Path, base_model: Path) -> None:
    files = Authority(tmp_path / "ca").issue("gateway", host="gateway.example")
    environ = {"HEARTH_HTTP_CERT": files.cert, "HEARTH_HTTP_KEY": files.key}
    options = ("--model", str(base_model), "--role", "both", "--http", "127.0.0.1:0", "--check")
    process = start_hearth(tmp_path, "up", *options, **environ)
    output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    assert output.count("(a base model, without a chat template") == 2
    assert "ready in" in output and "https://127.0.0.1:" in output


def test_curl_verifies_a_name_of_the_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    own, other = (authority.issue(each, host=each) for each in ("localhost", "a.example"))
    assert curl_target("http://127.0.0.1:80", "", "/v1") == ["http://127.0.0.1:80/v1"]
    assert curl_target("https://localhost:81", own.cert, "/v1") == [
        *("--cacert", own.cert, "https://localhost:81/v1")
    ]
    assert curl_target("https://127.0.0.1:81", other.cert, "/v1") == [
        *("--cacert", other.cert, "--connect-to", "a.example:81:127.0.0.1:81"),
        "https://a.example:81/v1",
    ]


def printed_for(*, is_chat: bool, **fields: object) -> str:
    """Returns what `hearth up` prints of a cluster when it is ready."""
    known = {"url": "http://a:1", "http_cert": "", "api_key": "k", "operator_token": "t"}
    known |= {"model_name": "m", "tenant_id": "default", "client_url": None, "is_kept": False}
    cluster = SimpleNamespace(**(known | {"state_dir": Path("/state")} | fields))
    console = Console(file=io.StringIO(), width=200)
    up._show_gateway(cluster, console, is_chat=is_chat)
    return console.file.getvalue()


@pytest.mark.parametrize("is_chat", [True, False])
def test_printed_requests_are_those_that_the_model_answers(is_chat: bool) -> None:
    printed = printed_for(is_chat=is_chat)
    assert ("/v1/completions" in printed, "/v1/chat/" in printed) == (not is_chat, is_chat)
    assert ("\nchat " in printed) == is_chat


@pytest.mark.parametrize("is_chat", [True, False])
def test_printed_requests_name_the_model_in_words_of_a_shell(is_chat: bool) -> None:
    """With several models a request without a name is refused; this one is quoted everywhere."""
    name, nats = "it's [8B]/one of two", "nats://client-1:word@[::1]:4222"
    fields = {"url": "http://[::1]:1", "model_name": name, "client_url": nats}
    printed = printed_for(is_chat=is_chat, **fields)
    commands = [shlex.split(each) for each in COMMAND.findall(printed)]
    assert len(commands) == (4 if is_chat else 1)
    for words in commands:
        if words[0] == "curl":
            path = unquote(words[2].removeprefix("http://[::1]:1"))
            assert path.endswith(f"/run/{name}") or json.loads(words[-1])["model"] == name
        else:
            assert words[-3:] == [nats, "What is the KV cache?", name]


@pytest.mark.parametrize(
    ("started", "path", "expected"),
    [
        ("bin/hearth", "bin", "hearth"),
        ("bin/hearth", "other", "bin/hearth"),  # another one is the first of the PATH
        ("bin/hearth", "none", "bin/hearth"),
        ("../a clone/bin/hearth", "none", "'{}/a clone/bin/hearth'"),
        ("services/__main__.py", "bin", f"{shlex.quote(sys.executable)} -m services"),
    ],
)
def test_own_command_starts_this_hearth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, path: str, expected: str
) -> None:
    here = tmp_path / "here"
    for name in ("here/bin/hearth", "here/other/hearth", "a clone/bin/hearth"):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.touch(mode=0o755)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", str(here / path))
    monkeypatch.setattr(sys, "argv", [started, "up"])
    assert own_command() == expected.format(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--http-cert", "/no"), "--http-cert /no is not a file"),
        (("--http-cert", "README.md"), "--http-cert and http-key must be given together"),
        (("--chat-template", "/no"), "--chat-template /no is not a file"),
    ],
)
def test_missing_files_are_one_line(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    refused = call_hearth(("up", *options), environ_for(tmp_path))
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr


class QuickClock(MonotonicClock):
    """Sleeps take no time, and 10 s."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    async def sleep(self, delay_s: float) -> None:
        self._now += 10.0


class Missing(Exception):
    pass


async def test_missing_processes_are_reported_after_a_while() -> None:
    """No gateway listens: nothing is known of any worker."""
    url = f"http://127.0.0.1:{free_port()}"
    clock = QuickClock()

    def on_missing(workers: Collection[str], has_answered: bool) -> None:
        raise Missing(clock.now(), sorted(workers), has_answered)

    with pytest.raises(Missing) as missing:
        await wait_until_ready(
            url,
            "token",
            {"prefill": ["p-1"], "decode": ["d-1"]},
            clock,
            trust=None,
            on_ready=lambda process_id: None,
            on_missing=on_missing,
        )
    assert missing.value.args == (30.0, ["d-1", "p-1"], False)
