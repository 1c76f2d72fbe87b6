"""Files that are made from others follow them."""

from __future__ import annotations

from tests.deploy.kubernetes import prometheus_rule


def test_rule_of_kubernetes_has_the_alerts() -> None:
    command = "python -m tests.deploy.kubernetes.prometheus_rule"
    assert prometheus_rule.PATH.read_text() == prometheus_rule.written(), command
