"""scripts/up and scripts/test on simulated machines; pip and Python only record their calls."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos import __main__ as chaos
from tests.clients import try_claude_code, try_codex
from tests.clients.__main__ import NO_TESTS, exit_status
from tests.clients.agent_program import program_of
from tests.fuzz import run as fuzz
from tests.simulation import sweep
from tests.skew import __main__ as skew
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INSTALL = "pip install --no-compile"


class Machine:
    """A copy of the scripts, and a PATH with basic tools and the programs that a test adds."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "hearth"
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=only_scripts)
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        tools = "bash basename dirname cat cksum tr grep uname env mkdir chmod cp mktemp rm sed"
        for tool in tools.split():
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.add("interpreter", f'[[ $1 == -c ]] && exit 0; exec {self.bin}/bash "$@"')
        self.calls_path = directory / "calls"

    def add(
        self, name: str, text: str, folder: Path | None = None, interpreter: str = "bash"
    ) -> None:
        """`interpreter` is that of pip in an environment: it has the packages that it is asked
        to import.
        """
        path = (self.bin if folder is None else folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin}/{interpreter}\n{text}\n")
        path.chmod(0o755)

    def add_venv(self, *, pip: str = "") -> None:
        """An environment whose programs record their arguments; `pip` is code that pip runs."""
        folder = self.root / ".venv" / "bin"
        for name in ("hearth", "pytest", "python", "ruff", "mypy"):
            self.add(name, f'echo "{name} $*" >> {self.calls_path}', folder)
        self.add("pip", f'echo "pip $*" >> {self.calls_path}\n{pip}', folder, "interpreter")

    def add_clients(self, name: str, *, pip: str = "") -> Path:
        """Requirements of clients, and their environment; its pip records calls and runs `pip`."""
        requirements = self.root / "tests" / "clients" / "sdks" / f"{name}.txt"
        requirements.parent.mkdir(parents=True, exist_ok=True)
        (requirements.parents[1] / "pytest.txt").touch()
        requirements.write_text("client==1")
        record = f'echo "{name}/bin/pip $*" >> {self.calls_path}\n'
        folder = self.root / ".venv-clients" / name / "bin"
        self.add("pip", record + pip, folder, "interpreter")
        return requirements

    @property
    def reference_list(self) -> Path:
        return self.root / "benchmarks" / "gpu_pack" / "environment.txt"

    def add_reference(self) -> None:
        """The reference image's software: a Python 3.12, and an environment as of `add_venv`."""
        self.reference_list.parent.mkdir(parents=True)
        self.reference_list.write_text("torch==2.11.0")
        self.add("python3.12", "exit 0")
        for name in ("pip", "python"):
            record = f'echo "reference {name} $*" >> {self.calls_path}'
            self.add(name, record, self.root / ".venv-gpu" / "bin", "interpreter")

    def run(
        self, script: str, *arguments: str, is_first: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a script, in a session of its own and with a path that is relative, as a user does;
        one that is not the first adds to the recorded calls.
        """
        if is_first:
            self.calls_path.write_text("")
        return subprocess.run(
            ["env", "--default-signal=INT", script, *arguments],
            cwd=self.root,
            start_new_session=True,
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **environ},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_path.read_text().splitlines()


def only_scripts(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(directory) / name).is_dir()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("these machines have no GPU")
    return Machine(tmp_path)


def test_old_python_is_reported(machine: Machine) -> None:
    machine.add("python3", "exit 1")
    result = machine.run("scripts/up")
    assert result.returncode == 2
    assert result.stderr.startswith("up: Python 3.11 or newer is needed")
    assert len(result.stderr.splitlines()) == 1


def test_newer_python_is_preferred(machine: Machine) -> None:
    machine.add("python3", "exit 1")
    machine.add("python3.12", f'[[ $1 == -c ]] && exit 0; echo "made $*" >> {machine.calls_path}')
    machine.run("scripts/up")
    assert machine.calls[-1] == f"made -m venv {machine.root}/.venv"


def test_python_that_is_named_is_the_only_one(machine: Machine) -> None:
    machine.add("python3", "exit 0")
    result = machine.run("scripts/up", HEARTH_PYTHON="/opt/python")
    assert result.returncode == 2
    assert result.stderr == "up: HEARTH_PYTHON=/opt/python is no Python 3.11 or newer\n"


def test_other_folders_that_a_user_changes_to_are_not_this_one(
    machine: Machine, tmp_path: Path
) -> None:
    machine.add_venv()
    (tmp_path / "other" / "scripts").mkdir(parents=True)
    machine.run("scripts/up", CDPATH=str(tmp_path / "other"))
    assert machine.calls[-1] == "hearth up"


MOVED = "#!{root}/moved/.venv/bin/python3\n# -*- coding: utf-8 -*-\n"
MOVED_FROM_A_SPACE = "#!/bin/sh\n'''exec' \"{root}/my folder/bin/python3\" \"$0\" \"$@\"\n' '''\n"
OTHER_VERSION = "#!{root}/newer\n# -*- coding: utf-8 -*-\n"  # has not the folder's packages
IN_A_SPACE = "#!/bin/sh\n'''exec' \"{root}/my clone/python3\" \"$0\" \"$@\"\n' '''\n"


@pytest.mark.parametrize("pip", [MOVED, MOVED_FROM_A_SPACE, OTHER_VERSION])
def test_environment_without_its_python_is_made_again(machine: Machine, pip: str) -> None:
    machine.add_venv()
    machine.add("newer", "exit 1", machine.root)
    machine.add("python3", f'[[ $1 == -c ]] && exit 0; echo "made $*" >> {machine.calls_path}')
    (machine.root / ".venv" / "bin" / "pip").write_text(pip.format(root=machine.root))
    machine.run("scripts/up")
    assert machine.calls[:2] == ["made --version", f"made -m venv --clear {machine.root}/.venv"]


@pytest.mark.parametrize("pip", [None, IN_A_SPACE])
def test_environment_with_its_python_is_kept(machine: Machine, pip: str | None) -> None:
    machine.add_venv()
    machine.add("python3", "exit 0", machine.root / "my clone")
    machine.add("python3", f'echo "made $*" >> {machine.calls_path}')
    if pip is not None:
        (machine.root / ".venv" / "bin" / "pip").write_text(pip.format(root=machine.root))
    machine.run("scripts/up")
    assert not any(each.startswith("made") for each in machine.calls)


def test_missing_venv_module_names_its_package(machine: Machine) -> None:
    machine.add("python3", '[[ $2 == "import venv, ensurepip" ]] && exit 1; exit 0')
    result = machine.run("scripts/test")
    assert result.returncode == 2
    assert "apt install python3-venv" in result.stderr


def test_cpu_torch_comes_from_configured_sources_first(machine: Machine) -> None:
    machine.add_venv()
    assert machine.run("scripts/up", "--check").returncode == 0
    torch, project, hearth = machine.calls
    assert torch == f"{INSTALL} --no-deps torch==2.13.0+cpu"
    assert "constraints-cpu.txt -e" in project
    assert project.endswith(f"{machine.root}[servers]")
    assert hearth == "hearth up --check"


def test_cpu_torch_falls_back_to_pytorchs_index(machine: Machine) -> None:
    machine.add_venv(pip='[[ "$*" != *--no-deps* ]]')
    assert machine.run("scripts/up").returncode == 0
    assert machine.calls[1] == f"{INSTALL} --extra-index-url {CPU_INDEX} torch==2.13.0+cpu"


def test_only_the_given_torch_index_is_used(machine: Machine) -> None:
    machine.add_venv()
    machine.run("scripts/up", HEARTH_TORCH_INDEX="https://mirror/cpu")
    torch, project, _ = machine.calls
    assert torch == f"{INSTALL} --extra-index-url https://mirror/cpu torch==2.13.0+cpu"
    assert "mirror" not in project


def test_failed_torch_install_names_the_index_variable(machine: Machine) -> None:
    machine.add_venv(pip="exit 1")
    result = machine.run("scripts/up")
    assert result.returncode == 2
    assert "HEARTH_TORCH_INDEX" in result.stderr.splitlines()[-1]
    assert not any(call.startswith("hearth") for call in machine.calls)


def test_torch_is_not_pinned_with_an_nvidia_driver(machine: Machine) -> None:
    machine.add("nvidia-smi", "exit 0")
    machine.add_venv()
    assert machine.run("scripts/up").returncode == 0
    assert machine.calls[0] == f"{INSTALL} -e {machine.root}[servers]"


def test_second_start_installs_only_after_a_project_change(machine: Machine) -> None:
    machine.add_venv()
    machine.run("scripts/up")
    machine.run("scripts/up")
    assert machine.calls == ["hearth up"]
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.run("scripts/up")
    assert len(machine.calls) == 3


def test_failed_installation_is_retried(machine: Machine) -> None:
    machine.add_venv(pip='[[ "$*" != *servers* ]]')
    assert machine.run("scripts/up").returncode != 0
    machine.add_venv()
    assert machine.run("scripts/up").returncode == 0
    assert any("[servers]" in call for call in machine.calls)


def waits_for_lock(path: Path) -> bool:
    """Whether a `flock` holds this file open: one that has the lock ends at once."""
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (each / "comm").read_text() == "flock\n" and (each / "fd" / "9").readlink() == path:
                return True
    return False


def test_two_starts_install_once(machine: Machine, tmp_path: Path) -> None:
    (machine.bin / "flock").symlink_to(shutil.which("flock") or "flock")
    may_end = tmp_path / "may_end"
    machine.add_venv(pip=f"until [[ -e {may_end} ]]; do :; done")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(machine.run, "scripts/up")
        wait_until(lambda: machine.calls_path.exists() and machine.calls)
        second = pool.submit(machine.run, "scripts/up", is_first=False)
        lock = machine.root / ".venv.lock"
        wait_until(lambda: len(machine.calls) > 1 or waits_for_lock(lock))
        may_end.touch()
        assert [each.result().returncode for each in (first, second)] == [0, 0]
    assert sum("[servers]" in each for each in machine.calls) == 1
    waiting = f"Waiting for another script, which installs into {machine.root}/.venv"
    assert second.result().stdout.splitlines() == [waiting]


def test_lock_that_cannot_be_written_is_left_out(machine: Machine) -> None:
    """As of a start by root, after which a user starts what is installed."""
    (machine.bin / "flock").symlink_to(shutil.which("flock") or "flock")
    machine.add_venv()
    (machine.root / ".venv.lock").mkdir()
    result = machine.run("scripts/up")
    assert (result.returncode, result.stderr) == (0, "")
    assert machine.calls[-1] == "hearth up"


WARM = "hearth warm"
PYTEST = "pytest -n 4 --dist worksteal"
SHORT = f"{PYTEST} --timeout 400"
DEPLOY = "python -m pytest tests/deploy"  # with promtool, if it can be had
RAISED = "python -m tests.deploy.record --live"
CLIENTS = "python -m tests.clients"
CHECKS = ["ruff check", "ruff format --check", "mypy "]


def calls_of(machine: Machine) -> list[str]:
    return [call for call in machine.calls if not call.split()[0].endswith("pip")]


def test_arguments_select_tests(machine: Machine) -> None:
    machine.add_venv()
    assert machine.run(".ci/run", "tests/shared").returncode == 0
    assert set(calls_of(machine)) == {f"{SHORT} tests/shared", *CHECKS}  # side by side


def test_ci_runs_short_tests_then_clients(machine: Machine) -> None:
    machine.add_venv()
    machine.add_clients("sdks")
    assert machine.run(".ci/run").returncode == 0
    calls = calls_of(machine)
    assert set(calls[:5]) == {WARM, SHORT, *CHECKS}  # the checks beside the others
    assert calls.index(WARM) < calls.index(SHORT)
    assert calls[5:] == [DEPLOY, RAISED, CLIENTS]


@pytest.mark.parametrize("failing", ["pytest", "python"])
def test_ci_runs_both_and_fails_if_either_fails(machine: Machine, failing: str) -> None:
    machine.add_venv()
    machine.add_clients("sdks")
    text = f'echo "{failing} $*" >> {machine.calls_path}; exit 1'
    machine.add(failing, text, machine.root / ".venv" / "bin")
    assert machine.run(".ci/run").returncode == 1
    assert {SHORT, CLIENTS} <= set(machine.calls)


def test_clients_are_installed_once_in_an_environment_of_each_file(machine: Machine) -> None:
    machine.add_venv()
    newest, oldest = machine.add_clients("newest"), machine.add_clients("oldest")
    machine.run("scripts/test", "--clients", "-k", "stream")
    installs = [f"newest/bin/pip install --no-compile --quiet -r {newest}"]
    installs.append(f"oldest/bin/pip install --no-compile --quiet -r {oldest}")
    assert sorted(machine.calls[2:4]) == installs  # side by side
    assert machine.calls[4:] == [DEPLOY, RAISED, f"{CLIENTS} -k stream"]
    oldest.write_text("changed==2")
    machine.run("scripts/test", "--clients")
    assert machine.calls == [installs[1], DEPLOY, RAISED, CLIENTS]


def test_clients_that_cannot_be_installed_fail_the_run(machine: Machine) -> None:
    machine.add_venv()
    machine.add_clients("sdks", pip="exit 1")
    for _ in range(2):
        assert machine.run("scripts/test", "--clients").returncode == 1
        assert CLIENTS not in machine.calls


def test_long_run_calls(machine: Machine) -> None:
    machine.add_venv()
    folder = machine.root / ".venv" / "bin"
    variables = "${TRITON_INTERPRET:-} ${PYTHONPATH:-} ${HEARTH_COMPILE_AGAIN:-}"
    machine.add("pytest", f'echo "pytest $* {variables}" >> {machine.calls_path}', folder)
    machine.add("python", f'echo "python $*" >> {machine.calls_path}; exit 1', folder)
    assert machine.run("scripts/test", "--long").returncode == 1
    oldest = machine.root / ".venv" / "oldest"
    runs = [" ".join(call.split()) for call in calls_of(machine)]
    assert runs == [
        f"{PYTEST} -m long",
        f"{PYTEST} -m long or not long tests/kernels/test_compiles.py 1",
        f"{PYTEST} -m long tests/kernels/compiled",
        f"{PYTEST} -m long tests/kernels/compiled {oldest}",
        f"{PYTEST} -m long or not long tests/kernels/gpu 1",
        f"{PYTEST} -m long or not long tests/kernels/gpu 1 {oldest}",
        "python -m tests.simulation.sweep --first 0 --seeds 10000",
        "python -m tests.simulation.sweep --seeds 2000 --variant layer-groups",
        "python -m tests.simulation.sweep --seeds 2000 --variant rank-groups",
        "python -m tests.simulation.sites --seeds 2000",
        "python -m tests.simulation.planted",
        "python -m tests.fuzz.planted",
        "python -m tests.fuzz.run --seconds 1800",
        "python -m tests.chaos --fault kill",
        "python -m tests.chaos --ranks",
        "python -m tests.chaos --images",
        "python -m tests.chaos --hosts",
        "python -m tests.chaos --frames",
        "python -m tests.chaos --soak-minutes 15",
        "python -m tests.containers",
        "python -m tests.skew",
        "python -m pytest tests/nixl",
    ]
    assert any(f"--target {oldest} triton==3.6.0" in call for call in machine.calls)


@pytest.mark.parametrize("share", ["compiled", "nixl"])
def test_packages_of_a_share_that_cannot_be_installed_fail_it(machine: Machine, share: str) -> None:
    machine.add_venv(pip='[[ "$*" != *--target* ]]')
    (machine.root / "tests" / "nixl").mkdir(parents=True)
    (machine.root / "tests" / "nixl" / "nixl.txt").write_text("nixl==1")
    for _ in range(2):  # it is tried again
        result = machine.run("scripts/test", "--long", share)
        assert (result.returncode, result.stdout.splitlines()[-1]) == (1, f"{share} failed")
        assert any("--target" in call for call in machine.calls)


INTERRUPT = "trap 'exit 2' INT\nkill -INT 0"  # as pytest, which ends by itself


def test_interrupted_run_ends(machine: Machine, tmp_path: Path) -> None:
    machine.add_venv()
    folder = machine.root / ".venv" / "bin"
    machine.add("pytest", f'echo "pytest $*" >> {machine.calls_path}\n{INTERRUPT}', folder)
    result = machine.run("scripts/test", "--long", "repeated", "schedules")
    assert result.returncode == -signal.SIGINT
    assert calls_of(machine) == [f"{PYTEST} -m long"]
    result = machine.run(".ci/run", TMPDIR=str(tmp_path / "hearth"))
    assert result.returncode == -signal.SIGINT
    assert CLIENTS not in machine.calls
    assert list(tmp_path.glob("hearth/tmp.*")) == []


def test_scripts_that_take_no_part_of_a_word_say_how_they_are_used(machine: Machine) -> None:
    for script in ("test", "release"):
        result = machine.run(f"scripts/{script}", "--help")
        assert (result.returncode, machine.calls) == (0, [])
        assert result.stdout.startswith(f"scripts/{script} ")
    result = machine.run("scripts/screenshots", "--help")
    assert (result.returncode, machine.calls) == (2, [])


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (fuzz.main, ["htpp"]),
        (lambda: sweep.main(sys.argv[1:]), ["--seeds", "0"]),
        (chaos.main, ["--fault", "device", "--victim", "gateway-1"]),
        (chaos.main, ["--site-fault", "link cut"]),
        (chaos.main, ["--ranks", "--fault", "device"]),
        (lambda: try_codex.main(sys.argv[1:]), ["no-such-codex"]),
        (lambda: try_claude_code.main(sys.argv[1:]), ["--helps"]),
    ],
)
def test_words_that_select_nothing_are_refused(
    main: Callable[[], object], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *words])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2


def test_program_is_found_from_the_folder_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent").write_text("")
    (tmp_path / "agent").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert program_of("./agent") == str(tmp_path / "agent")


def test_selection_that_leaves_out_all_clients_fails() -> None:
    statuses = [0, NO_TESTS]
    assert exit_status(statuses, is_selected=True) == 0
    assert exit_status(statuses, is_selected=False) == 1
    assert exit_status([NO_TESTS, NO_TESTS], is_selected=True) == 1


def test_release_that_the_clone_lacks_fails_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["skew", "no-such-commit"])
    assert skew.main() == 2


def test_pack_needs_python_312(machine: Machine, tmp_path: Path) -> None:
    machine.add("python3.12", "exit 1")
    result = machine.run("scripts/gpu_pack", "DIR", HOME=str(tmp_path))
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpu_pack: Python 3.12 is needed")
    assert line.endswith("(set HEARTH_PYTHON312)")


def test_pack_runs_with_the_software_of_the_reference_image(machine: Machine) -> None:
    """Installed once, with torch's CPU build if there is one."""
    machine.add_reference()
    for _ in range(2):
        assert machine.run("scripts/gpu_pack", "DIR").returncode == 0
        assert machine.calls[-1] == "reference python -P -m benchmarks.gpu_pack DIR"
    assert len(machine.calls) == 1
    machine.reference_list.write_text("torch==2.12.0")
    machine.run("scripts/gpu_pack", "DIR")
    assert machine.calls[:-1] == [
        "reference pip install --quiet --no-deps torch==2.12.0+cpu",
        f"reference pip install --quiet -r {machine.reference_list}",
    ]


def test_pack_uses_the_environment_that_is_named(machine: Machine, tmp_path: Path) -> None:
    machine.add("python", f'echo "$*" >> {machine.calls_path}', tmp_path / "mine" / "bin")
    result = machine.run("scripts/gpu_pack", "DIR", HEARTH_REFERENCE=str(tmp_path / "mine"))
    assert (result.returncode, machine.calls) == (0, ["-P -m benchmarks.gpu_pack DIR"])


@pytest.mark.parametrize("call", ["pytest -n", "ruff check", "ruff format", "mypy "])
def test_any_failing_tool_fails_the_run(machine: Machine, call: str) -> None:
    machine.add_venv()
    tool, argument = call.split(" ")
    machine.add(tool, f'[[ "${{1:-}}" != "{argument}" ]]', machine.root / ".venv" / "bin")
    assert machine.run("scripts/test").returncode == 1
