"""services/deploy/kubernetes without a cluster: it is valid, and what it names exists."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import typer
import yaml

from services.__main__ import app
from shared.config import GatewayConfig
from tests.deploy.kubernetes.manifests import (
    BUILDS,
    VERSIONS,
    built,
    everything,
    named,
    pod_specs,
    problem,
)
from tests.services.cli.in_process import call_hearth

SECRETS = "/run/secrets/hearth/"
OF_OTHERS = {"hearth-tls"}  # made by who has the certificates


@pytest.mark.parametrize("version", VERSIONS)
def test_every_built_object_is_valid(version: str) -> None:
    things = everything()
    assert {each["kind"] for each in things} > {"Deployment", "ServiceMonitor", "ScaledObject"}
    problems = {
        f"{each['kind']} {each['metadata']['name']}": found
        for each in things
        if (found := problem(each, version)) is not None
    }
    assert problems == {}


def test_typo_in_each_kind_is_found() -> None:
    for kind, thing in {each["kind"]: each for each in everything()}.items():
        changed = copy.deepcopy(thing)
        place = changed.get("spec") or (changed if "data" in changed else changed["metadata"])
        first = next(each for each in place if each not in ("apiVersion", "kind", "metadata"))
        place[f"{first}s"] = place.pop(first)
        found = problem(changed, VERSIONS[-1])
        assert found is not None and "no schema" not in found, (kind, first)


def test_kind_without_a_schema_is_found() -> None:
    thing = {"apiVersion": "example.com/v1", "kind": "Unknown", "metadata": {"name": "x"}}
    assert "no schema" in str(problem(thing, VERSIONS[-1]))


def test_wrong_value_is_found_with_its_path() -> None:
    changed = copy.deepcopy(named("hearth-gateway", "Deployment"))
    changed["spec"]["replicas"] = "two"
    assert str(problem(changed, VERSIONS[0])).startswith("spec.replicas")


def containers(build: str) -> dict[str, dict[str, Any]]:
    specs = pod_specs(list(built(build))).items()
    return {name: container for name, spec in specs for container in spec["containers"]}


def hearth_containers(build: str) -> dict[str, dict[str, Any]]:
    found = containers(build).items()
    return {name: each for name, each in found if each["image"].startswith("hearth:")}


@pytest.mark.parametrize("build", BUILDS)
def test_arguments_and_variables_are_options_of_the_command(build: str) -> None:
    group = typer.main.get_command(app)
    for name, container in hearth_containers(build).items():
        if "command" in container:  # of operators: each of their commands takes these two
            continue
        command, *arguments = container["args"]
        context = group.commands[command].make_context(None, [], resilient_parsing=True)
        context.resilient_parsing = False
        group.commands[command].make_parser(context).parse_args(list(arguments))
        known = {each.envvar for each in group.commands[command].params}
        given = {each["name"].removesuffix("_FILE") for each in container["env"]}
        assert {each for each in given if each.startswith("HEARTH_")} <= known, name


@pytest.mark.parametrize("build", BUILDS)
def test_settings_are_options_of_some_command(build: str) -> None:
    commands = typer.main.get_command(app).commands
    names = [
        container["args"][0]
        for container in hearth_containers(build).values()
        if "args" in container
    ]
    known = {each.envvar for name in names for each in commands[name].params}
    assert set(named("hearth", "ConfigMap", build)["data"]) <= known


@pytest.mark.parametrize("build", BUILDS)
def test_both_ends_of_the_data_plane_have_one_security(build: str) -> None:
    """A gateway that demands keys sends no pixels to workers without."""
    settings = named("hearth", "ConfigMap", build)["data"]
    variable, found = "HEARTH_DATA_PLANE_SECURITY", set()
    for container in hearth_containers(build).values():
        own = {each["name"]: each.get("value") for each in container["env"]}
        if container.get("args", [""])[0] in ("gateway", "encode", "prefill", "decode"):
            found.add(own.get(variable, settings.get(variable)))
    assert found == {"aead" if build == "overlays/edge-site" else "none"}


@pytest.mark.parametrize("build", BUILDS)
def test_secrets_are_those_of_the_command(build: str) -> None:
    done = call_hearth(("credential", "--kubernetes"), {})
    made = {each["metadata"]["name"]: each for each in yaml.safe_load_all(done.stdout)}
    for each in made.values():
        assert problem(each, VERSIONS[-1]) is None
    for name, spec in pod_specs(list(built(build))).items():
        mounted = {v["secret"]["secretName"] for v in spec["volumes"] if "secret" in v} - OF_OTHERS
        assert mounted <= made.keys(), name
        (container,) = spec["containers"]
        files = re.findall(rf"{SECRETS}([\w.-]+)", str(container))
        assert set(files) <= made[min(mounted)]["stringData"].keys()
        assert files or name == "hearth-redis"


@pytest.mark.parametrize("build", BUILDS)
def test_every_pod_is_restricted(build: str) -> None:
    for name, spec in pod_specs(list(built(build))).items():
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_grace_period_covers_pre_stop_lame_duck_drain_and_stop() -> None:
    defaults = {each.name: each.default for each in msgspec.structs.fields(GatewayConfig)}
    drain_s = float(named("hearth", "ConfigMap")["data"]["HEARTH_DRAIN_TIMEOUT_S"])
    for name, spec in pod_specs(list(built("base"))).items():
        if name.removeprefix("hearth-") in ("nats", "redis", "operator"):
            continue
        hook = spec["containers"][0].get("lifecycle", {}).get("preStop", {})
        pre_stop_s = hook.get("sleep", {}).get("seconds", 0)
        lame_duck_s = defaults["lame_duck_s"] if "gateway" in name else 0
        assert spec["terminationGracePeriodSeconds"] >= pre_stop_s + lame_duck_s + drain_s + 10


def test_probes_are_those_of_the_processes() -> None:
    probed = {
        name: {
            kind: container[kind]["httpGet"]["path"] for kind in ("readinessProbe", "livenessProbe")
        }
        for name, container in hearth_containers("base").items()
        if "operator" not in name
    }
    gateway = probed.pop("hearth-gateway")
    assert gateway == {"readinessProbe": "/ready", "livenessProbe": "/health"}
    others = {"readinessProbe": "/ready", "livenessProbe": "/healthz"}
    assert probed == dict.fromkeys(probed, others) and len(probed) == 4


def test_ports_of_policies_are_those_that_processes_listen_on() -> None:
    pods = containers("base")
    listening = {p["containerPort"] for each in pods.values() for p in each.get("ports", ())}
    policies = [each["spec"] for each in built("base") if each["kind"] == "NetworkPolicy"]
    open_ports = {
        port["port"]
        for each in policies
        for rule in each.get("ingress", ())
        for port in rule.get("ports", ())
    }
    assert open_ports == listening
    decode = {e["name"]: e.get("value") for e in pods["hearth-decode"]["env"]}
    assert int(decode["HEARTH_DATA_PLANE_PORT"]) in open_ports


def test_policies_let_kv_and_pixels_through() -> None:
    for build in BUILDS:
        for source, target, port in data_plane_connections(build):
            assert is_allowed(build, source, target, port), (build, source, target, port)
    assert not is_allowed("base", "hearth-scheduler", "hearth-decode", 7700)
    assert not is_allowed("base", "hearth-prefill", "hearth-decode", 7702)


def data_plane_connections(build: str) -> Iterator[tuple[str, str, int]]:
    """Yields who pushes KV to which port of which pod, and with an encode worker images."""
    pods = {name: each.get("args", [""]) for name, each in hearth_containers(build).items()}
    has_images = "hearth-encode" in pods
    for name, (command, *arguments) in pods.items():
        num_ranks = int(arguments[arguments.index("--tp") + 1]) if "--tp" in arguments else 1
        if command == "decode":
            yield "hearth-prefill", name, 7700
        if command == "rank":
            yield "hearth-prefill", name, 7701
        if has_images and command in ("prefill", "decode", "encode"):
            for source in {"hearth-gateway", "hearth-encode"} - {name}:
                yield source, name, 7700 + num_ranks


def is_allowed(build: str, source: str, target: str, port: int) -> bool:
    """Whether the policies of both pods allow a connection; a pod without one of a direction may
    do all of that direction.
    """
    labels = {
        each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"]
        for each in built(build)
        if each["kind"] in ("Deployment", "StatefulSet")
    }
    policies = [each["spec"] for each in built(build) if each["kind"] == "NetworkPolicy"]

    def selects(selector: dict[str, Any], pod: str) -> bool:
        wanted = selector.get("matchLabels", {}).items()
        return wanted <= labels[pod].items() and "matchExpressions" not in selector

    def allows(direction: str, peers: str, pod: str, peer: str) -> bool:
        mine = [
            each
            for each in policies
            if direction in each["policyTypes"] and selects(each["podSelector"], pod)
        ]
        return not mine or any(
            all(
                [
                    peers not in rule
                    or any(
                        "podSelector" in p and selects(p["podSelector"], peer) for p in rule[peers]
                    ),
                    "ports" not in rule
                    or any(p["port"] <= port <= p.get("endPort", p["port"]) for p in rule["ports"]),
                ]
            )
            for each in mine
            for rule in each.get(direction.lower(), ())
        )

    return allows("Ingress", "from", target, source) and allows("Egress", "to", source, target)


@pytest.mark.parametrize("build", BUILDS)
def test_roll_outlasts_the_start_that_probes_allow(build: str) -> None:
    """`kubectl rollout status` fails once a Deployment has made no progress for so long."""
    for each in built(build):
        if each["kind"] != "Deployment":
            continue
        for container in each["spec"]["template"]["spec"]["containers"]:
            probe = container.get("startupProbe", {"periodSeconds": 0, "failureThreshold": 0})
            start_s = probe["periodSeconds"] * probe["failureThreshold"]
            name = each["metadata"]["name"]
            assert each["spec"].get("progressDeadlineSeconds", 600) > start_s, name


def test_operator_keeps_its_list_when_its_pod_is_replaced() -> None:
    deployment = named("hearth-operator", "Deployment")["spec"]
    spec = deployment["template"]["spec"]
    (container,) = spec["containers"]
    paths = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    claims = {
        paths[each["name"]]: each["persistentVolumeClaim"]["claimName"]
        for each in spec["volumes"]
        if "persistentVolumeClaim" in each
    }
    (list_file,) = (e["value"] for e in container["env"] if e["name"] == "HEARTH_RETRACTIONS")
    claim = named(claims[list_file.rpartition("/")[0]], "PersistentVolumeClaim")["spec"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    assert deployment["strategy"] == {"type": "Recreate"}  # two pods may be on two nodes


@pytest.mark.parametrize("server", ["hearth-nats", "hearth-redis"])
def test_servers_are_open_to_processes_of_the_namespace_alone(server: str) -> None:
    rules = named(server, "NetworkPolicy")["spec"]["ingress"]
    assert [set(peer) for rule in rules for peer in rule["from"]] == [{"podSelector"}]


def test_wanted_workers_are_the_replicas() -> None:
    for build, least in (("overlays/monitored", 1), ("overlays/scale-to-zero", 0)):
        for role in ("prefill", "decode"):
            spec = named(f"hearth-{role}", "HorizontalPodAutoscaler", build)["spec"]
            (metric,) = spec["metrics"]
            assert spec["minReplicas"] == least
            assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
            assert metric["external"]["metric"]["selector"]["matchLabels"]["role"] == role
