"""The PrometheusRule of the alerts; `python -m tests.deploy.kubernetes.prometheus_rule` writes."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

DEPLOY = Path(__file__).parents[3] / "services" / "deploy"
PATH = DEPLOY / "kubernetes" / "components" / "monitoring" / "prometheus_rule.yaml"
HEAD = """\
# The alerts of services/deploy/alerts.yml, from which this file is made.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: hearth
spec:
"""


def written() -> str:
    _, _, groups = (DEPLOY / "alerts.yml").read_text().partition("groups:\n")
    return HEAD + indent("groups:\n" + groups, "  ")


if __name__ == "__main__":
    PATH.write_text(written())
