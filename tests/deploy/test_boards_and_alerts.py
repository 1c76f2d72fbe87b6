"""The shipped boards and alert rules: valid, and about metrics that exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.reference.error_meanings import MEANING, descendants
from shared.errors import HearthError
from shared.metrics.machine import MachineCollector
from shared.tls import TlsFiles
from tests.deploy.exposed import gateway_metrics, names_of, process_metrics
from tests.deploy.promtool import needs_promtool, promtool
from tests.deploy.record import RECORDED
from tests.deploy.rules import ALERTS, DEPLOY, METRIC, rules
from tests.deploy.scenarios import SCENARIOS

BOARDS = [DEPLOY / "grafana" / name for name in ("hearth.json", "hearth-fleet.json")]
TESTS = sorted(Path(__file__).parent.glob("alert_tests*.yml"))
VLLM = Path(__file__).with_name("vllm_expressions.txt")
# processes of one tree have one release, and its workers one format; a failed host, a full disk,
# TLS, GPUs and other sites are not of this cluster
BY_HAND = {
    *("HearthKvMismatch", "HearthModelFailed", "HearthRedisRejectsWrites"),
    *("HearthCertificateExpires", "HearthNatsCertificateExpires", "HearthDiskFull"),
    *("HearthGpuFault", "HearthGpuThrottled"),
    *("HearthLinkCut", "HearthSpillOver", "HearthDrainLong", "HearthMixedReleases"),
}
VARIABLES = {
    **{"$__rate_interval": "5m", "$__range": "1h"},
    **{"$model": ".*", "$region": ".*", "$tenant": ".*", "$worker": ".*"},
}


def panels(board: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(board.read_text())["panels"]
    return found


def expressions(board: Path) -> Iterator[str]:
    for panel in panels(board):
        for target in panel["targets"]:
            expression: str = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield expression


def all_expressions() -> list[str]:
    shown = [each for board in BOARDS for each in expressions(board)]
    return [*shown, *(each["expr"] for each in rules())]


def test_each_metric_of_boards_and_alerts_is_exposed() -> None:
    exposed = {*names_of(gateway_metrics().render().decode()), *names_of(process_metrics())}
    named = {name for each in all_expressions() for name in METRIC.findall(each)}
    assert len(named) > 40
    assert named - exposed == set()


def test_scrapes_keep_what_processes_alone_export() -> None:
    """A gateway has all of the fleet but this: of a worker that no scrape keeps, no alert is."""
    (job,) = (
        each
        for each in yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
        if each["job_name"] == "hearth-process"
    )
    monitors = DEPLOY / "kubernetes/components/monitoring/monitors.yaml"
    *_, monitor = yaml.safe_load_all(monitors.read_text())
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    own = {each.name for each in MachineCollector(TlsFiles()).collect()}
    own.add("hearth_event_loop_stall_seconds")
    assert own <= {name for each in rules() for name in METRIC.findall(each["expr"])}
    for (kept,) in (job["metric_relabel_configs"], endpoint["metricRelabelings"]):
        assert kept["action"] == "keep"
        assert [name for name in own if not re.fullmatch(kept["regex"], name)] == []
        assert not re.fullmatch(kept["regex"], "hearth_process_live")


def test_each_metric_of_boards_made_for_vllm_is_exposed() -> None:
    named = set(METRIC.findall(VLLM.read_text()))
    assert named - set(names_of(gateway_metrics().render("vllm").decode())) == set()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.stem)
def test_panels_are_whole(board: Path) -> None:
    content = json.loads(board.read_text())
    assert content["uid"] == board.stem
    assert content["templating"]["list"][0]["type"] == "datasource"
    ids = [each["id"] for each in content["panels"]]
    assert len(ids) == len(set(ids))
    for panel in content["panels"]:
        assert panel["title"] and panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    first_row = [each for each in content["panels"] if each["gridPos"]["y"] == 0]
    assert {each["type"] for each in first_row} == {"stat"}
    assert sum(each["gridPos"]["w"] for each in first_row) == 24


def test_values_have_the_units_of_their_panels() -> None:
    """What follows `or` is seen only where the first metric has no series."""
    for panel in (each for board in BOARDS for each in panels(board)):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for expression in (each["expr"] for each in panel["targets"]):
            assert "rate(" in expression or unit not in ("ops", "reqps", "Bps"), panel["title"]
            assert " or " not in expression.replace(" or vector(0)", ""), panel["title"]


def test_variables_are_labels_of_the_metrics_they_filter() -> None:
    """Each variable is used, and each that is used is declared."""
    for board in BOARDS:
        text = board.read_text()
        declared = {f"${each['name']}" for each in json.loads(text)["templating"]["list"]}
        used = {name for name in VARIABLES if re.search(rf"{re.escape(name)}\b", text)}
        assert used - {"$__rate_interval", "$__range"} == declared - {"$datasource"}


def test_errors_of_the_headline_are_those_of_the_server() -> None:
    panel = next(each for each in panels(BOARDS[0]) if each["title"] == "Errors")
    [named] = re.findall(r'outcome=~"([^"]+)"', panel["targets"][0]["expr"])
    classes = {each.code: each for each in descendants(HearthError) if each.code in MEANING}
    assert {*named.split("|")} == {c for c, each in classes.items() if each.http_status >= 500}


def test_each_alert_has_a_test_and_a_line_in_the_runbook() -> None:
    names = {each["alert"] for each in rules()}
    tested = {
        rule["alertname"]
        for path in TESTS
        for test in yaml.safe_load(path.read_text())["tests"]
        for rule in test["alert_rule_test"]
        if rule.get("exp_alerts")
    }
    recorded = {alert for each in SCENARIOS for alert in each.alerts}
    assert tested | recorded == names
    assert recorded == names - BY_HAND
    runbook = (DEPLOY / "README.md").read_text()
    for rule in rules():
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert path == "services/deploy/README.md"
        assert f'<a id="{anchor}"></a>`{rule["alert"]}`' in runbook
        assert rule["annotations"]["description"].endswith(".")


@needs_promtool
def test_prometheus_accepts_rules_and_their_tests() -> None:
    promtool("check", "rules", str(ALERTS))
    recorded = [RECORDED / f"{each.name}.yml" for each in SCENARIOS]
    promtool("test", "rules", *map(str, (*TESTS, *recorded)))
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus.yml"))


@needs_promtool
def test_prometheus_accepts_each_expression_of_the_boards(tmp_path: Path) -> None:
    shown = [*(each for board in BOARDS for each in expressions(board))]
    shown += [each for each in VLLM.read_text().splitlines() if each and each[0] != "#"]
    recorded = [{"record": f"panel:{n}", "expr": each} for n, each in enumerate(shown)]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
    promtool("check", "rules", "--lint=none", str(file))


@needs_promtool
@pytest.mark.parametrize("names", ["hearth", "process", "vllm"])
def test_prometheus_finds_no_fault_in_the_exposition(names: str) -> None:
    given = process_metrics() if names == "process" else gateway_metrics().render(names).decode()
    # Prometheus leaves colons to recording rules; vLLM's names have them
    # and one of its histograms ends as a counter
    given = given.replace("vllm:iteration_tokens_total", "vllm:iteration_tokens")
    assert promtool("check", "metrics", given=given.replace("vllm:", "vllm_")) == ""
