"""scripts/up and scripts/test on machines of several kinds; pip and Python are recorders here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class Machine:
    """A copy of the scripts, and a PATH that holds basic tools and what a test adds."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "hearth"
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        shutil.copytree(ROOT / "scripts", self.root / "scripts", ignore=only_scripts)
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        tools = "bash basename dirname cat cksum tr grep uname env mkdir chmod cp"
        for tool in tools.split():
            found = shutil.which(tool)
            assert found is not None, tool
            (self.bin / tool).symlink_to(found)
        self.calls_path = directory / "calls"

    def add(self, name: str, text: str, where: Path | None = None) -> None:
        path = (self.bin if where is None else where) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{self.bin}/bash\n{text}\n")
        path.chmod(0o755)

    def add_venv(self, *, pip: str = "") -> None:
        """An environment whose programs write their arguments down; `pip` may then fail."""
        for name in ("pip", "hearth", "pytest", "ruff", "mypy"):
            record = f'echo "{name} $*" >> {self.calls_path}\n'
            self.add(name, record + (pip if name == "pip" else ""), self.root / ".venv" / "bin")

    def run(self, script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        self.calls_path.write_text("")
        return subprocess.run(
            [self.root / script, *arguments],
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


def test_an_old_python_is_named(machine: Machine) -> None:
    machine.add("python3", "exit 1")
    result = machine.run("scripts/up")
    assert result.returncode == 2
    assert result.stderr.startswith("up: Python 3.11 or newer is needed")
    assert len(result.stderr.splitlines()) == 1


def test_a_newer_python_beside_an_old_one_is_taken(machine: Machine) -> None:
    machine.add("python3", "exit 1")
    machine.add("python3.12", f'[[ $1 == -c ]] && exit 0; echo "made $*" >> {machine.calls_path}')
    machine.run("scripts/up")
    assert machine.calls[-1] == f"made -m venv {machine.root}/.venv"


def test_a_missing_venv_module_names_its_package(machine: Machine) -> None:
    machine.add("python3", '[[ $2 == "import venv, ensurepip" ]] && exit 1; exit 0')
    result = machine.run("scripts/test")
    assert result.returncode == 2
    assert "apt install python3-venv" in result.stderr


def test_cpu_torch_comes_from_the_configured_sources_first(machine: Machine) -> None:
    machine.add_venv()
    assert machine.run("scripts/up", "--check").returncode == 0
    torch, project, hearth = machine.calls
    assert torch == "pip install --no-deps torch==2.13.0+cpu"
    assert "constraints-cpu.txt -e" in project
    assert project.endswith(f"{machine.root}[servers]")
    assert hearth == "hearth up --check"


def test_else_from_pytorchs_own_index(machine: Machine) -> None:
    machine.add_venv(pip='[[ "$*" != *--no-deps* ]]')
    assert machine.run("scripts/up").returncode == 0
    assert machine.calls[1] == f"pip install --extra-index-url {CPU_INDEX} torch==2.13.0+cpu"


def test_a_named_index_is_the_only_one_asked(machine: Machine) -> None:
    machine.add_venv()
    machine.run("scripts/up", HEARTH_TORCH_INDEX="https://mirror/cpu")
    torch, project, _ = machine.calls
    assert torch == "pip install --extra-index-url https://mirror/cpu torch==2.13.0+cpu"
    assert "mirror" not in project


def test_no_torch_at_all_is_one_clear_line(machine: Machine) -> None:
    machine.add_venv(pip="exit 1")
    result = machine.run("scripts/up")
    assert result.returncode == 2
    assert "HEARTH_TORCH_INDEX" in result.stderr.splitlines()[-1]
    assert not any(call.startswith("hearth") for call in machine.calls)


def test_with_an_nvidia_driver_nothing_is_pinned(machine: Machine) -> None:
    machine.add("nvidia-smi", "exit 0")
    machine.add_venv()
    assert machine.run("scripts/up").returncode == 0
    assert machine.calls[0] == f"pip install -e {machine.root}[servers]"


def test_a_second_start_installs_nothing_until_the_project_changes(machine: Machine) -> None:
    machine.add_venv()
    machine.run("scripts/up")
    machine.run("scripts/up")
    assert machine.calls == ["hearth up"]
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    machine.run("scripts/up")
    assert len(machine.calls) == 3


def test_a_failed_installation_is_tried_again(machine: Machine) -> None:
    machine.add_venv(pip='[[ "$*" != *servers* ]]')
    assert machine.run("scripts/up").returncode != 0
    machine.add_venv()
    assert machine.run("scripts/up").returncode == 0
    assert any("[servers]" in call for call in machine.calls)


def test_ci_runs_tests_lint_format_and_types(machine: Machine) -> None:
    machine.add_venv()
    assert machine.run(".ci/run", "tests/shared").returncode == 0
    assert [call for call in machine.calls if not call.startswith("pip")] == [
        "pytest -n 2 --dist loadfile tests/shared",
        "ruff check",
        "ruff format --check",
        "mypy ",
    ]


def test_a_whole_run_interprets_the_kernels_with_the_newest_and_the_oldest_triton(
    machine: Machine,
) -> None:
    machine.add_venv()
    record = f'echo "pytest ${{TRITON_INTERPRET:-0}} ${{PYTHONPATH:-}}" >> {machine.calls_path}'
    machine.add("pytest", record, machine.root / ".venv" / "bin")
    assert machine.run("scripts/test").returncode == 0
    oldest = machine.root / ".venv" / "oldest"
    runs = [call for call in machine.calls if call.startswith("pytest")]
    assert runs == ["pytest 0 ", "pytest 1 ", f"pytest 1 {oldest}"]
    assert any(f"--target {oldest} triton==3.6.0" in call for call in machine.calls)


@pytest.mark.parametrize("call", ["pytest -n", "ruff check", "ruff format", "mypy "])
def test_any_of_them_fails_the_run(machine: Machine, call: str) -> None:
    machine.add_venv()
    tool, argument = call.split(" ")
    machine.add(tool, f'[[ "${{1:-}}" != "{argument}" ]]', machine.root / ".venv" / "bin")
    assert machine.run("scripts/test").returncode == 1
