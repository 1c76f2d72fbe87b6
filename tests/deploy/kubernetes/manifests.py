"""Builds the kustomizations, and judges each object by the schema of its kind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate.utils
import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "services" / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("1.35", "1.36", "1.37")
BUILDS = ("base", *sorted(f"overlays/{each.name}" for each in (FOLDER / "overlays").iterdir()))

# The library reads the definitions of a version anew for each object.
kubernetes_validate.utils.schema_contents = cache(kubernetes_validate.utils.schema_contents)


@cache
def built(name: str) -> tuple[dict[str, Any], ...]:
    """Returns the objects of a folder as `kubectl kustomize` prints them."""
    kubectl = shutil.which("kubectl", path=sysconfig.get_path("scripts")) or "kubectl"
    done = subprocess.run([kubectl, "kustomize", FOLDER / name], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def everything() -> list[dict[str, Any]]:
    """Returns the objects of all folders, equal ones once."""
    return list({json.dumps(each): each for name in BUILDS for each in built(name)}.values())


def named(name: str, kind: str, build: str = "base") -> dict[str, Any]:
    (found,) = (
        each for each in built(build) if (each["kind"], each["metadata"]["name"]) == (kind, name)
    )
    return found


def problem(thing: dict[str, Any], version: str) -> str | None:
    """Returns why Kubernetes of this version, or the controller of a custom resource, refuses an
    object, with the path of the field.
    """
    own = SCHEMAS / f"{thing['kind']}.json"
    if own.exists():
        error = next(iter(_validator(own).iter_errors(thing)), None)
        return None if error is None else f"{'.'.join(map(str, error.instance_path))}: {error}"
    try:
        kubernetes_validate.validate(thing, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"no schema: {error.message}"
    return None


@cache
def _validator(path: Path) -> Any:
    return jsonschema_rs.validator_for(json.loads(path.read_text()))


def pod_specs(things: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the pods of Deployments and StatefulSets by name."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in things
        if each["kind"] in ("Deployment", "StatefulSet")
    }
