"""Starts a cluster and runs the tests of outside clients against it: `scripts/test --clients`.

Each FOLDER/NAME.txt here lists clients of exact versions. `scripts/test` installs them in an
environment of their own, .venv-clients/NAME, in which the tests of the folder run.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.services.cli.cluster.chat_checkpoint import write_chat_checkpoint
from tests.support.account import (
    ACCOUNT,
    AGENT_MODEL,
    AGENTS,
    ALIAS,
    BROWSER,
    EXPIRED,
    EYES,
    EYES_MODEL,
    HARMONY,
    HARMONY_MODEL,
    LIMITED,
    MODEL,
    OTHER,
    OWN_ALIAS,
    RESTRICTED,
    VARIABLE,
    Account,
    write_accounts,
)
from tests.support.cluster.hearth_up import Cluster, run_cluster
from tests.support.services.running import run_hearth
from tests.support.services.seeing_dir import write_seeing_dir
from tests.wide.checkpoint import write_wide_checkpoint
from tests.wide.harmony import write_harmony_checkpoint

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
ENVIRONMENTS = ROOT / ".venv-clients"
CONTEXT = 4096
TENANTS = {OTHER: (), LIMITED: ("--requests-per-min", "1"), RESTRICTED: ("--allowed-models", "no")}
TOOLS_AS_TEXT = {"HEARTH_TOOL_FORMAT": "hermes"}  # of a chat template without tools
NO_TESTS = 5  # pytest's exit status when nothing is collected


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if all tests pass. `arguments` are for pytest, such as -k NAME."""
    environments = find_environments()
    with tempfile.TemporaryDirectory(prefix="hearth-clients-") as folder:
        accounts = Path(folder) / "accounts.json"
        with run_accounts(Path(folder)) as running:
            write_accounts(accounts, running)
            statuses = [run_tests(each, accounts, arguments) for each in environments]
    return exit_status(statuses, is_selected=bool(arguments))


def exit_status(statuses: Sequence[int], *, is_selected: bool) -> int:
    """`statuses`: pytest's. A selection may leave out all tests of an environment, not of all."""
    allowed = {0, NO_TESTS} if is_selected else {0}
    return int(not allowed.issuperset(statuses) or 0 not in statuses)


def find_environments() -> list[Path]:
    """Returns the requirements file of each environment. Exits if one is not installed."""
    found = sorted(FOLDER.glob("*/*.txt"))
    missing = [str(python_of(each)) for each in found if not python_of(each).exists()]
    if missing:
        sys.exit(f"tests.clients: no {', '.join(missing)}: run scripts/test --clients")
    return found


def python_of(requirements: Path) -> Path:
    return ENVIRONMENTS / requirements.stem / "bin" / "python"


@contextlib.contextmanager
def run_accounts(folder: Path) -> Iterator[list[Account]]:
    """Runs the clusters, tenants and aliases of `tests/support/account.py`; yields the accounts."""
    model = write_chat_checkpoint(folder / MODEL, max_position_embeddings=CONTEXT)
    wide = write_wide_checkpoint(folder / AGENT_MODEL)
    harmony = write_harmony_checkpoint(folder / HARMONY_MODEL)
    seeing = write_seeing_dir(folder / EYES_MODEL)
    with (
        run_cluster(folder, "--model", str(model)) as cluster,
        run_cluster(folder / AGENTS, "--model", str(wide)) as agents,
        run_cluster(folder / HARMONY, "--model", str(harmony)) as thinking,
        run_cluster(folder / EYES, "--model", str(seeing), variables=TOOLS_AS_TEXT) as eyes,
        run_cluster(folder / BROWSER, "--decode", "2") as browser,
    ):
        keys = {name: hearth(folder, "tenant", "add", name, *TENANTS[name]) for name in TENANTS}
        hearth(folder, "model", "alias", ALIAS, MODEL)
        hearth(folder, "model", "alias", OWN_ALIAS, MODEL, "--tenant", ACCOUNT)
        keys[ACCOUNT] = cluster.state.api_key
        accounts = [Account(cluster.url, name, key) for name, key in keys.items()]
        accounts.append(Account(agents.url, AGENTS, agents.state.api_key))
        accounts.append(Account(thinking.url, HARMONY, thinking.state.api_key))
        accounts.append(Account(eyes.url, EYES, eyes.state.api_key))
        yield [*accounts, *browser_accounts(folder / BROWSER, browser)]


def browser_accounts(state_home: Path, cluster: Cluster) -> list[Account]:
    key = hearth(state_home, "tenant", "add", EXPIRED, "--requests-per-min", "60")
    hearth(state_home, "tenant", "rotate", EXPIRED, "--keep-s", "0")
    return [browser_account(cluster), Account(cluster.url, EXPIRED, key)]


def browser_account(cluster: Cluster, num_decode: int = 2) -> Account:
    workers = [f"decode-{number}" for number in range(1, num_decode + 1)]
    pids = {name: cluster.pid_of(name) for name in (*workers, "gateway-1")}
    state = cluster.state
    return Account(cluster.url, BROWSER, state.api_key, state.operator_token, pids)


def hearth(state_home: Path, *arguments: str) -> str:
    """Runs a command; returns what it printed. Raises RuntimeError if it failed."""
    done = run_hearth(state_home, *arguments)
    if done.returncode != 0:
        raise RuntimeError(f"hearth {' '.join(arguments)}: {done.stderr}")
    return done.stdout.strip()


def run_tests(requirements: Path, accounts: Path, arguments: Sequence[str]) -> int:
    """Runs a folder's tests in one environment. Returns pytest's exit status."""
    print(f"── {requirements.relative_to(ROOT)}", flush=True)
    # tests/conftest.py, above FOLDER, imports Hearth.
    command = ["-m", "pytest", "--confcutdir", str(FOLDER), str(requirements.parent), *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ[VARIABLE] = str(accounts)
    return subprocess.run([python_of(requirements), *command], cwd=ROOT, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
