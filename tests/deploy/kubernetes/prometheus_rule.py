"""The PrometheusRule of the alerts; `python -m tests.deploy.kubernetes.prometheus_rule` writes."""

from __future__ import annotations

from textwrap import indent

from tests.deploy.kubernetes.manifests import FOLDER

PATH = FOLDER / "components" / "monitoring" / "prometheus_rule.yaml"
HEAD = """\
# The alerts of services/deploy/alerts.yml, from which this file is made.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: hearth
spec:
"""


def written() -> str:
    _, _, groups = (FOLDER.parent / "alerts.yml").read_text().partition("groups:\n")
    return HEAD + indent("groups:\n" + groups, "  ")


if __name__ == "__main__":
    PATH.write_text(written())
