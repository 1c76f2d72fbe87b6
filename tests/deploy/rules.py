"""The shipped alert rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

import services.deploy

DEPLOY = Path(services.deploy.__file__).parent
ALERTS = DEPLOY / "alerts.yml"
METRIC = re.compile(r"\b(?:hearth_|vllm:)\w+")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def metrics_of(alert: str) -> set[str]:
    """The names of the metrics in its expression."""
    (rule,) = (each for each in rules() if each["alert"] == alert)
    return set(METRIC.findall(rule["expr"]))
