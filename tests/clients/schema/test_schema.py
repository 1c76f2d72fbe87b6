"""Requests that Schemathesis draws from the served OpenAPI document, valid and invalid ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.account import Account

MAX_EXAMPLES = 25  # of each operation; tests/fuzz draws more bodies
LEAST_CASES = 900


def test_no_request_is_answered_with_a_server_error(account: Account, tmp_path: Path) -> None:
    config, report = tmp_path / "schemathesis.toml", tmp_path / "report.json"
    config.write_text(f'[parameters]\n"path.account" = "{account.id}"\n')
    command = [
        Path(sys.executable).with_name("st"),
        *("--config-file", config, "run", f"{account.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {account.token}"),
        *("--checks", "not_a_server_error,content_type_conformance", "--phases", "fuzzing"),
        *(
            "--max-examples",
            str(MAX_EXAMPLES),
            "--seed",
            "1",
            "--workers",
            "2",
            "--request-timeout",
            "60",
        ),
        # it depends on what is drawn of a schema with many alternatives, not on the gateway
        *("--suppress-health-check", "filter_too_much"),
        *("--warnings", "off", "--report-json-path", report),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-10_000:]
    cases = json.loads(report.read_text())["test_cases"]
    assert cases["generated"] > LEAST_CASES
    assert cases["with_failures"] == cases["errored"] == 0
