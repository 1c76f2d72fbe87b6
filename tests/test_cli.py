"""The `hearth` command: help, options, model names and error messages."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from services.cli.cluster.option_texts import HELP, PANEL_OF
from services.cli.cluster.service_options import (
    DEMO_MODEL_DIR,
    DEMO_MODEL_NAME,
    model_name_for,
    service_command,
)
from shared.config import GatewayConfig, KvIndexConfig, SchedulerConfig, WorkerConfig
from tests.services.cli.in_process import call_hearth
from tests.support.grids import in_one_test

COMMANDS = [
    *("up", "chat", "status", "bench", "credential", "api-key", "tenant", "usage"),
    *("nats-config", "health", "warm", "logs", "version", "doctor", "stop"),
    *("prefix", "compress", "decompress", "quantize", "quality"),
    *("gateway", "scheduler", "kv-index", "prefill", "decode", "worker"),
]


def clean_environ(**environ: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}
    return {**clean, "COLUMNS": "200", "XDG_STATE_HOME": "/nonexistent", **environ}


def hearth(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return call_hearth(arguments, clean_environ(**environ))


def hearth_process(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=clean_environ(**environ),
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
    )


def test_commands_import_what_they_use_alone() -> None:
    result = hearth_process("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert f" {command} " in result.stdout
    code = (
        "import sys; from services.__main__ import _command\n"
        "commands = _command().commands\n"
        "commands['status']; import services.cli.fleet.status\n"
        "others = {'services.cli.tenants', 'services.cli.cluster', 'services.service_commands'}\n"
        "slow = {'torch', 'numpy', 'transformers', 'litestar', 'redis', 'huggingface_hub'}\n"
        "assert not (slow | others) & set(sys.modules), (slow | others) & set(sys.modules)\n"
        "dict(commands)\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_shell_completes_commands_options_and_values() -> None:
    for words, found in (
        ("hearth lo", ["logs"]),
        ("hearth logs --lev", ["--level"]),
        ("hearth logs --level w", ["warning"]),
    ):
        variables = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        shown = hearth_process(_HEARTH_COMPLETE="complete_bash", **variables)
        assert (shown.returncode, shown.stdout.split()) == (0, found), shown.stderr


def test_demo_model_name_does_not_depend_on_its_path() -> None:
    assert model_name_for(DEMO_MODEL_DIR, "") == DEMO_MODEL_NAME
    assert model_name_for(DEMO_MODEL_DIR / ".." / DEMO_MODEL_DIR.name, "") == DEMO_MODEL_NAME
    assert model_name_for(DEMO_MODEL_DIR, "mine") == "mine"
    assert model_name_for(Path(DEMO_MODEL_NAME), "") == DEMO_MODEL_NAME
    assert model_name_for(Path("/models/other"), "") == ""


def test_hub_model_name_is_its_id() -> None:
    assert model_name_for(Path("org/name-1.5"), "") == "org/name-1.5"
    assert model_name_for(Path("org/name-1.5"), "mine") == "mine"
    assert model_name_for(Path("services/local"), "") == ""  # an existing directory


def test_process_output_equals_in_process_output() -> None:
    """Other tests call `main` in the test process; this test starts the command."""
    for arguments in (["chat"], ["status", "--help"]):
        process, called = hearth_process(*arguments), hearth(*arguments)
        assert process.returncode == called.returncode
        assert process.stdout == called.stdout
        assert process.stderr == called.stderr


@pytest.mark.parametrize("is_unbuffered", ["", "1"])
def test_full_disk_is_told_in_one_line(is_unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "services", "version"]
        environ = clean_environ(PYTHONUNBUFFERED=is_unbuffered)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environ)
    assert done.returncode == 2
    assert done.stderr == "hearth: standard output: No space left on device\n"


def test_output_that_nobody_reads_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "services", "version"]
    environ = clean_environ(PYTHONUNBUFFERED="")
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environ)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_no_argument_prints_help() -> None:
    assert hearth().stdout == hearth("--help").stdout


def test_every_command_has_help_with_an_example() -> None:
    for command in COMMANDS:
        result = hearth(command, "--help")
        assert result.returncode == 0, command
        assert "Example" in result.stdout or command == "health", command


@pytest.mark.parametrize("config", [GatewayConfig, SchedulerConfig, KvIndexConfig, WorkerConfig])
def test_every_config_field_has_help_text(config: type) -> None:
    fields = msgspec.structs.fields(config)
    names = {field.name for field in fields} - {"option_files"}  # made of the environment
    assert names <= set(HELP)
    assert names <= set(PANEL_OF)


@in_one_test(
    ("arguments", "words"),
    [
        (["serve"], "No such command 'serve': see `hearth --help`"),
        (["chat", "\udcff"], r"an argument or a variable is not UTF-8: b'\xff'"),
        (["gateway"], "Missing option '--nats-url'"),
        (["decode", "--nats-url", "x"], "nats_url must start with nats://"),
        (
            ["decode", "--nats-url", "nats://127.0.0.1:1", "--model-dir", "/no"],
            "/no is not a directory",
        ),
        (["scheduler", "--nats-url", "nats://h:1", "--max-queued-tokens", "0"], "must be positive"),
        (["decode", "--nats-url", "nats://h:1", "--role", "all"], "--role"),
        (["up", "--model", "/no"], "/no does not exist: expected a checkpoint directory"),
        (["scheduler", "--nats-url", "nats://h:1", "--log-level", "loud"], "log_level 'loud' is"),
        (["up", "--log-format", "xml"], "--log-format 'xml' is none of auto, json, text"),
        (["up", "--kv-cache-bytes", "8 gigs"], "'8 gigs' is not a size such as 8GiB"),
        (["gateway", "--max-body-bytes", "x"], "--max-body-bytes"),
        (["plan", "--memory", "much"], "'--memory': 'much' is not a size such as 8GiB"),
        (["decode", "--role", "all"], "'--role': 'all' is not one of 'own', 'both'"),
        (["up", "--redis", "http://h"], "--redis must start with redis://"),
        (["up", "--nats", "http://h"], "--nats: nats_url must start with nats://"),
        (["up", "--http", "8000"], "--http '8000' is not HOST:PORT"),
        (["up", "--http", "h:70000"], "is not HOST:PORT"),
        (["up", "--model", "/tmp", "--decode", "0"], "nothing could answer"),
        (["chat"], "start one with `hearth up`"),
        (["chat", "--url", "http://127.0.0.1:9"], "--api-key"),
        (["chat", "--url", "127.0.0.1:9", "--api-key", "k"], "must start with http"),
        (["chat", "--url", "http://127.0.0.1:9", "--api-key", "k"], "cannot reach"),
        (["chat", "--url", "http://[::1", "--api-key", "k"], "--url: Invalid IPv6 URL"),
        (["chat", "--url", "http://h:99999", "--api-key", "k"], "--url: Port out of range"),
        (["chat", "--url", "http://", "--api-key", "k"], "--url names no host"),
        (["verify", "id", "--url", "http://h", "--api-key", "ü"], "a character that no API key"),
        (["bench"], "start one with `hearth up`"),
        (["bench", "--concurrency", "a"], "--concurrency 'a' is not a list of numbers"),
        (["bench", "--concurrency", "0", "--requests", "0"], "--requests 0 is not positive"),
        (["bench", "--url", "http://127.0.0.1:9", "--key", "k"], "cannot reach"),
        (["bench", "--rate", "nan"], "--rate nan is not positive"),
        (["bench", "--duration-s", "inf"], "--duration-s inf is not positive"),
        (["bench", "--concurrency", "9" * 20], "is more than 100,000"),
        (["bench", "--url", "http://h", "--model", "/tmp"], "give one of them"),
        (["bench", "--model", "/no"], "/no does not exist: expected a checkpoint directory"),
        (["status"], "start one with `hearth up`"),
        (["stop"], "start one with `hearth up`"),
        (["doctor", "--url", "127.0.0.1:9"], "url must start with http://"),
        (["doctor", "--nats-url", "http://h"], "nats_url must start with nats://"),
        (["doctor", "--redis-url", "http://h"], "redis_url must start with redis://"),
        (["status", "--interval-s", "0"], "--interval-s 0 is not positive"),
        (["credential", "decode"], "start one with `hearth up`"),
        (["nats-config", "router=r"], "unknown role 'router'"),
        (["nats-config", "gateway=g", "--port", "0"], "--port"),
        (["nats-config", "gateway=g", "--host", 'a"b'], "neither the name of a host"),
        (["nats-config", "gateway=g", "--tls", 'a"b'], "nats-server takes no such path"),
        (["tenant", "add", "a", "--allowed-regions", "eu,a b"], "region 'a b' may have letters"),
        (["tenant", "add", "a", "--region-class", "a=b"], "region class 'a=b' may have letters"),
        (["health", "--nats-url", "nats://127.0.0.1:9"], "--process-id is needed"),
        (["api-key", "team-a", "--redis-url", "http://x"], "redis_url must start with redis://"),
        (["api-key", "team-a", "--redis-url", "redis://127.0.0.1:9"], "Redis does not answer"),
        (["api-key", "a:b", "--redis-url", "redis://127.0.0.1:9"], "invalid tenant id"),
        (["tenant"], "Missing command: see `hearth tenant --help`"),
        (["tenant", "add", "a"], "start one with `hearth up`"),
        (["tenant", "list", "--redis-url", "redis://127.0.0.1:9"], "Redis does not answer"),
        (["tenant", "add", "a", "--concurrency", "-1"], "--concurrency '-1' is neither an integer"),
        (["tenant", "limits", "a"], "no limit is given"),
        (["tenant", "limits", "a", "--weight", "x"], "--weight"),
        (["tenant", "revoke", "a"], "--key ID or --all"),
        (["tenant", "revoke", "a", "--all", "--key", "k"], "--key ID or --all"),
        (["tenant", "rotate", "a", "--keep-s", "-1"], "--keep-s -1 is not from 0"),
        (["usage", "--redis-url", "redis://h?timeout=x"], "redis_url: Invalid value for 'timeout'"),
        (["usage", "--redis-url", "redis://h/x"], "redis_url: database 'x' is not a number"),
        (["plan", "--activations", "x"], "activations 'x' is not plain or bf16-exchange"),
        (["usage", "--days", "0"], "--days 0 is not from 1 to 400"),
        (["compress", "/no", "/tmp/new"], "/no is not a directory"),
        (["compress", "shared/demo_model", "/tmp"], "/tmp exists already"),
        (["compress", "shared/demo_model", "shared/demo_model/b"], "is inside of"),
        (["compress", "shared/demo_model"], "Missing argument 'OUT'"),
        (["compress", "shared/demo_model", "/tmp/new", "--threads", "0"], "--threads"),
        (["decompress", "shared/demo_model", "/tmp/new"], "not a bundle"),
        (["quantize", "/no", "/tmp/new"], "/no is not a directory"),
        (["quantize", "shared/demo_model", "/tmp"], "/tmp exists already"),
        (["quantize", "shared/demo_model", "/tmp/new", "--group", "48"], "group_size 48"),
        (["quantize", "shared/demo_model", "/tmp/new", "--ignore", "re:.*"], "left to quantize"),
        (["quantize", "shared/demo_model", "/tmp/new", "--ignore", "re:["], "is no pattern"),
    ],
)
def test_invalid_arguments_print_one_line_and_exit_with_2(arguments: list[str], words: str) -> None:
    result = hearth(*arguments)
    assert result.returncode == 2, result.stderr
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("hearth: ")


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ([], {}, ("auto", False)),
        (["--mode", "fast", "--zero-freed-blocks"], {}, ("fast", True)),
        ([], {"HEARTH_MODE": "fast", "HEARTH_ZERO_FREED_BLOCKS": "true"}, ("fast", True)),
        (
            ["--mode", "exact", "--no-zero-freed-blocks"],
            {"HEARTH_MODE": "fast", "HEARTH_ZERO_FREED_BLOCKS": "true"},
            ("exact", False),
        ),
    ],
)
def test_option_overrides_its_environment_variable(
    arguments: list[str], variables: dict[str, str], expected: tuple[str, bool]
) -> None:
    seen: list[tuple[str, bool]] = []

    def run(config: WorkerConfig) -> int:
        seen.append((config.mode, config.zero_freed_blocks))
        raise typer.Exit

    app = typer.Typer()
    app.command()(service_command(WorkerConfig, "decode", run))
    result = CliRunner().invoke(
        app, ["--nats-url", "nats://d-1:w@127.0.0.1:1", *arguments], env=variables
    )
    assert (result.exit_code, seen) == (0, [expected])


def test_sizes_have_units_on_the_command_line_and_in_variables() -> None:
    seen: list[tuple[int | None, int | None]] = []

    def run(config: WorkerConfig) -> int:
        seen.append((config.kv_cache_bytes, config.kv_ceiling_bytes))
        raise typer.Exit

    app = typer.Typer()
    app.command()(service_command(WorkerConfig, "decode", run))
    arguments = ["--nats-url", "nats://d-1:w@127.0.0.1:1", "--kv-cache-bytes", "1.5g"]
    result = CliRunner().invoke(app, arguments, env={"HEARTH_KV_CEILING_BYTES": "2GB"})
    assert (result.exit_code, seen) == (0, [(3 << 29, 2 * 10**9)])


def test_environment_variables_set_options() -> None:
    result = hearth("decode", HEARTH_NATS_URL="nats://d-1:word@127.0.0.1:9", HEARTH_DTYPE="int3")
    assert result.returncode == 2
    assert "dtype 'int3'" in result.stderr
    assert "word" not in result.stderr


def test_gateway_may_have_no_model_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[GatewayConfig] = []
    monkeypatch.setattr("services.cli.cluster.service_options._leave", lambda status: None)
    app = typer.Typer()
    app.command()(service_command(GatewayConfig, "gateway", lambda c: configs.append(c) or 0))
    urls = ["--nats-url", "nats://gateway-1:x@h", "--redis-url", "redis://h"]
    for more in ([], ["--model-dir", ""], ["--model-dir", str(DEMO_MODEL_DIR)]):
        result = CliRunner().invoke(app, [*urls, *more], env=clean_environ())
        assert result.exit_code == 0, result.output
    demo, none, same = configs
    assert (demo.model_dir, demo.served_name) == (DEMO_MODEL_DIR, DEMO_MODEL_NAME)
    assert (none.model_dir, none.served_name) == (None, "")
    assert (same.model_dir, same.served_name) == (demo.model_dir, demo.served_name)
    result = CliRunner().invoke(app, [*urls, "--model-dir", "", "--model-name", "x"])
    assert "model_name 'x' needs a model_dir" in str(result.exception)
