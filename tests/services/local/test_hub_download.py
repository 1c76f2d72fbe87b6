"""Models by hub id: from the disk cache, from a hub, with errors of the hub and without a hub."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.local.hub_download import is_hub_id, local_copy
from tests.services.local.hub_home import COMMIT, MODEL, write_hub_home
from tests.support.services.faulty_hub import ENDLESS, FAULTS, faulty_hub, hub_environ
from tests.support.services.running import environ_for

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub_home(tmp_path: Path, chat_model: Path) -> Path:
    return write_hub_home(tmp_path / "hf", chat_model)


def resolve(*models: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Calls `local_copy` in a new process, as huggingface_hub reads its variables at import. All
    calls begin at the same time; a line of each is printed in their order.
    """
    code = (
        "import sys; from concurrent.futures import ThreadPoolExecutor; from pathlib import Path\n"
        "from services.local.hub_download import local_copy\n"
        "from shared.errors import ConfigError\n"
        "def run(model):\n"
        "    try: return True, local_copy(Path(model), needs_weights=sys.argv[1] == 'weights')\n"
        "    except ConfigError as error: return False, error.message\n"
        "with ThreadPoolExecutor() as threads: found = list(threads.map(run, sys.argv[2:]))\n"
        "for is_found, line in found: print(line, file=sys.stdout if is_found else sys.stderr)\n"
        "sys.exit(not all(each for each, _ in found))"
    )
    needs = environ.pop("NEEDS", "weights")
    return subprocess.run(
        [sys.executable, "-c", code, needs, *models],
        env={**clean_environ(), **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def clean_environ() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("HF_")}


def error_line(model: str, **environ: str) -> str:
    return error_lines(model, **environ)[0]


def error_lines(*models: str, **environ: str) -> list[str]:
    """Of models of which none can be had."""
    result = resolve(*models, **environ)
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr
    return result.stderr.strip().splitlines()[-len(models) :]


def test_hub_id_syntax(tmp_path: Path) -> None:
    for text in ("org/name", "meta-llama/Llama-3.2-1B", "a/b_c.d"):
        assert is_hub_id(Path(text))
    for text in (
        "./x/model.gguf",
        "org/model.safetensors",
        "name",
        "/org/name",
        "./org/name/x",
        "~/name",
        "../name",
        "a/b/c",
        str(tmp_path),
    ):
        assert not is_hub_id(Path(text)), text


def test_existing_directory_takes_precedence_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert local_copy(Path("org/name")) == Path("org/name")
    assert local_copy(tmp_path) == tmp_path
    assert local_copy(Path("/nowhere")) == Path("/nowhere")  # the configuration check reports it


def test_cached_model_alone_is_used_offline(hub_home: Path) -> None:
    result = resolve(MODEL, "org/other", HF_HOME=str(hub_home), HF_HUB_OFFLINE="1")
    found = Path(result.stdout.strip())
    assert found.name == COMMIT, result.stderr
    assert (found / "model.safetensors").is_file()
    assert result.returncode == 1
    assert "'org/other' is not a directory here, not in" in result.stderr
    assert "HF_HUB_OFFLINE prevents the download" in result.stderr
    assert "Traceback" not in result.stderr


def test_cached_model_is_used_if_the_hub_is_unreachable(hub_home: Path) -> None:
    result = resolve(MODEL, HF_HOME=str(hub_home), HF_ENDPOINT="http://127.0.0.1:9")
    assert result.returncode == 0, result.stderr
    assert COMMIT in result.stdout


def test_unreachable_hub_and_invalid_hub_id_are_in_the_error(tmp_path: Path) -> None:
    environ = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"}
    line, invalid = error_lines(MODEL, "org/a..b--c", **environ)
    assert "http://127.0.0.1:9 cannot be reached" in line
    assert "give a checkpoint directory" in line
    assert "'org/a..b--c' is not a directory here, and not a valid id on" in invalid


Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


@contextlib.contextmanager
def hub(answer: Callable[[str], Answer]) -> Iterator[str]:
    """Yields the URL of an HTTP server; `answer` maps the path of a request to its response."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self.path.partition("?")[0])
            self.send_response(status)
            for name, text in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, text)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{ }",
    "tokenizer.model": b"t",
    "chat_template.jinja": b"j",
    "additional_chat_templates/tool_use.jinja": b"tool",
    "additional_chat_templates/other.safetensors": b"x",
    "additional_chat_templates_2/a.json": b"y",
    "1_Pooling/config.json": b"{  }",
    "1_Pooling/model.safetensors": b"zz",
    "1_P/config.json": b"{   }",
    "2_Dense/config.json": b"{    }",
    "modules.json": b"[ ]",
    "adapter/model.safetensors": b"z",
    "a/a.json": b"aa",
    "model-00001-of-00001.safetensors": b"w" * 1000,
    "consolidated.safetensors": b"w" * 1001,
    "original/params.json": b"[]",
    "pytorch_model.bin": b"b",
    "README.md": b"r",
}


def published(path: str) -> Answer:
    """The hub's response for a repository of FILES."""
    if path.startswith("/api/") and "/tree/" in path:
        entries = [
            {"type": "file", "path": name, "size": len(data), "oid": f"{number:040x}"}
            for number, (name, data) in enumerate(FILES.items())
        ]
        return 200, {}, json.dumps(entries).encode()
    if path.startswith("/api/models/"):
        names = [{"rfilename": name} for name in FILES]
        return 200, {}, json.dumps({"id": MODEL, "sha": COMMIT, "siblings": names}).encode()
    data = FILES.get(path.partition(f"/resolve/{COMMIT}/")[2])
    if data is None:
        return 404, {}, b""
    return 200, {"ETag": f'"{len(data):040x}"', "X-Repo-Commit": COMMIT}, data


@pytest.mark.parametrize("needs", ["weights", "text"])
def test_only_files_that_hearth_reads_are_downloaded(tmp_path: Path, needs: str) -> None:
    with hub(published) as url:
        result = resolve(MODEL, HF_HOME=str(tmp_path), HF_ENDPOINT=url, NEEDS=needs)
    assert result.returncode == 0, result.stderr
    folder = Path(result.stdout.strip())
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    weights = {"model-00001-of-00001.safetensors"} if needs == "weights" else set()
    texts = {"config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "README.md"}
    texts |= {"additional_chat_templates/tool_use.jinja", "modules.json", "1_Pooling/config.json"}
    assert found == texts | weights
    assert (folder / "tokenizer.json").read_bytes() == FILES["tokenizer.json"]
    assert "Fetching" in result.stderr  # the progress bar


STATUSES = {
    401: ("RepoNotFound", "has no accessible model of that name: check the id"),
    404: ("RepoNotFound", "has no accessible model of that name: check the id"),
    403: ("GatedRepo", "is gated: accept its terms at"),
    500: ("", "cannot be reached"),
}


def test_error_of_the_hub_is_one_line(tmp_path: Path) -> None:
    def answer(path: str) -> Answer:
        status = next(each for each in STATUSES if f"/status-{each}" in path)
        return status, {"X-Error-Code": STATUSES[status][0]}, b'{"error": "no"}'

    models = [f"org/status-{each}" for each in STATUSES]
    with hub(answer) as url:
        lines = error_lines(*models, HF_HOME=str(tmp_path), HF_ENDPOINT=url)
    for line, model, (_, words) in zip(lines, models, STATUSES.values(), strict=True):
        assert words in line
        assert model in line


def test_any_failure_of_a_download_is_one_line(tmp_path: Path) -> None:
    home = tmp_path / "hf"
    faults = [each for each in FAULTS if each not in ENDLESS]
    with faulty_hub() as url:
        models = [f"org/{fault}" for fault in faults]
        lines = error_lines(*models, **hub_environ(url, str(home)))
    for line, fault in zip(lines, faults, strict=True):
        assert line.count("'org/") == 1 and f"'org/{fault}'" in line and url in line
    assert not [*home.rglob("outside*"), *tmp_path.glob("outside*")]


def test_safetensors_are_required_only_with_weights(hub_home: Path) -> None:
    for path in hub_home.rglob("model.safetensors"):
        path.unlink()
    offline = {"HF_HOME": str(hub_home), "HF_HUB_OFFLINE": "1"}
    assert "no *.safetensors" in error_line(MODEL, **offline)
    assert resolve(MODEL, NEEDS="text", **offline).returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        ("decode", "--nats-url", "nats://127.0.0.1:1", "--model-dir", MODEL),
        pytest.param(("up", "--model", MODEL), marks=pytest.mark.long),
        pytest.param(("bench", "--model", MODEL), marks=pytest.mark.long),
    ],
    ids=lambda command: command[0],
)
def test_command_reports_an_uncached_model_in_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "services", *command],
        env={**environ_for(tmp_path), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(f"hearth: model {MODEL!r} is not a directory here")
    assert len(result.stderr.splitlines()) == 1
