"""The running cluster as an outside client knows it: an address, accounts with tokens, models.

`python -m tests.clients` writes it; the tests, which run without Hearth's code, read it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

VARIABLE = "HEARTH_CLIENTS"
MODEL = "tiny"
ALIAS = "@cf/meta/llama-4-scout-17b-16e-instruct"  # an alias of MODEL for all accounts
OWN_ALIAS = "@cf/own/tiny"  # an alias of MODEL for ACCOUNT alone

ACCOUNT = "default"
OTHER = "other"
LIMITED = "limited"  # one request a minute
RESTRICTED = "restricted"  # may use another model only
AGENTS = "agents"  # an account of a second cluster, which serves AGENT_MODEL alone
BROWSER = "browser"  # an account of a third cluster, with the demo model and two decode workers
EXPIRED = "expired"  # of the same cluster, with an expired key and a limit of 60 requests a minute
EYES = "eyes"  # an account of a fourth cluster, which serves EYES_MODEL alone
EYES_MODEL = "seeing"  # takes images
AGENT_MODEL = "wide"  # calls the tools that it is offered
TOO_LONG = "Hello, World! " * 4096  # more tokens than the context of MODEL
HARMONY = "harmony"  # an account of a fifth cluster, which serves HARMONY_MODEL alone
HARMONY_MODEL = "wide-gpt-oss"  # thinks before it calls them


@dataclass(frozen=True)
class Account:
    """A tenant. Cloudflare's clients name it in paths, and send its API key as their token."""

    url: str
    id: str
    token: str
    operator_token: str = ""
    pids: dict[str, int] = field(default_factory=dict)  # workers that tests may end

    @property
    def v4(self) -> str:
        """The base address of the Cloudflare API: https://api.cloudflare.com/client/v4 at
        Cloudflare.
        """
        return f"{self.url}/client/v4"

    @property
    def ai(self) -> str:
        return f"{self.v4}/accounts/{self.id}/ai"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}


def write_accounts(path: Path, accounts: list[Account]) -> None:
    path.write_text(json.dumps([asdict(each) for each in accounts]))


def read_accounts() -> dict[str, Account]:
    """Returns the accounts by id. Raises LookupError outside of `python -m tests.clients`."""
    path = os.environ.get(VARIABLE)
    if path is None:
        raise LookupError(f"${VARIABLE} names no file of accounts: run scripts/test --clients")
    accounts = [Account(**each) for each in json.loads(Path(path).read_text())]
    return {each.id: each for each in accounts}
