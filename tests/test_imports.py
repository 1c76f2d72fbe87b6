"""Import rules: services do not import each other; only engine and kernels import torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.grids import in_one_test

ROOT = Path(__file__).resolve().parent.parent
BASE = {
    "msgspec",
    "structlog",
    "nats",
    "redis",
    "uvloop",
    "xxhash",
    "prometheus_client",
    "cryptography",
}
TENSORS = {"torch", "triton", "numpy", "numba", "safetensors", "transformers", "zstandard"}
WEB = {"litestar", "uvicorn", "jinja2", "markupsafe", "tiktoken", "tokenizers", "httpx"}
TERMINAL = {"typer", "rich", "click", "httpx"}
HUB = {"huggingface_hub"}


@dataclass(frozen=True)
class Rule:
    """`inside` are dotted prefixes of our own modules; `outside` are foreign top-level packages."""

    inside: tuple[str, ...]
    outside: frozenset[str]
    excluded: tuple[str, ...] = ()


def rule(inside: str, *outside: set[str], excluded: str = "") -> Rule:
    return Rule(tuple(inside.split()), frozenset().union(*outside), tuple(excluded.split()))


# The rule of the longest matching path applies.
RULES = {
    "kernels": rule("kernels", {"torch", "triton", "numpy", "numba", "llvmlite"}),
    "shared": rule("shared", BASE, excluded="shared.engine"),
    "shared/grammar": rule("shared", BASE, {"llguidance"}, excluded="shared.engine"),
    "shared/device_health": rule("shared", BASE, {"pynvml"}, excluded="shared.engine"),
    "shared/engine": rule("shared kernels", BASE, TENSORS),
    "services/scheduler": rule(
        "services.scheduler shared", BASE, {"numpy", "numba"}, excluded="shared.engine"
    ),
    "services/kv_index": rule("services.kv_index shared", BASE, excluded="shared.engine"),
    "services/gateway": rule(
        "services.gateway shared", BASE, WEB, {"regex", "opentelemetry"}, excluded="shared.engine"
    ),
    "services/gateway/images": rule(
        "services.gateway shared", BASE, {"PIL", "numpy"}, excluded="shared.engine"
    ),
    "services/gateway/images/addresses": rule(
        "services.gateway shared", BASE, {"httpx"}, excluded="shared.engine"
    ),
    "services/guides/examples": rule("", {"openai"}),
    "services/host": rule("services.host services.local services.worker shared", BASE),
    "services/prefill": rule("services.prefill shared", BASE),
    "services/encode": rule("services.encode shared", BASE),
    "services/worker": rule(
        "services.worker services.encode services.prefill services.decode shared", BASE
    ),
    "services/decode": rule("services.decode shared", BASE),
    "services/cli": rule(
        "services.cli services.local services.client shared",
        BASE,
        TERMINAL,
        excluded="shared.engine",
    ),
    "services/cli/doctor": rule(
        "services.cli services.local shared kernels.cache",
        BASE,
        TERMINAL,
        HUB,
        {"packaging"},
        excluded="shared.engine",
    ),
    "services/cli/model_check.py": rule("services.cli services.local shared", BASE),
    "services/cli/checkpoints": rule("services.cli services.local shared", BASE, TERMINAL),
    "services/cli/cluster/warm_command.py": rule(
        "services.cli services.local shared", BASE, TERMINAL
    ),
    "services/cli/checkpoints/quality_prompts.py": rule(
        "services.cli services.gateway.text shared", BASE, TERMINAL
    ),
    "services/client": rule("services.client shared", BASE, TERMINAL, excluded="shared.engine"),
    "services/local": rule(
        "services.local shared",
        BASE,
        TERMINAL,
        HUB,
        excluded="shared.engine",
    ),
    "services": rule("services shared", BASE, TERMINAL),
}


def sources() -> list[Path]:
    folders = (ROOT / name for name in ("kernels", "shared", "services"))
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert len(found) > 40
    return found


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Dotted names as written; `from a import b` gives `a.b`, since b may be a module."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).parts[: -node.level] if node.level else ()
            module = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def rule_of(path: Path) -> Rule:
    relative = path.relative_to(ROOT).as_posix()
    places = [place for place in RULES if f"{relative}/".startswith(f"{place}/")]
    return RULES[max(places, key=len)]


def is_within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def is_allowed(name: str, rule: Rule) -> bool:
    top = name.partition(".")[0]
    if name == "services":  # the bare package, to find its path
        return any(prefix.startswith("services") for prefix in rule.inside)
    if top in ("kernels", "shared", "services", "tests", "benchmarks", "scripts"):
        return is_within(name, rule.inside) and not is_within(name, rule.excluded)
    return top in sys.stdlib_module_names or top in rule.outside


def test_every_file_imports_only_allowed_modules() -> None:
    offenders = {
        path.relative_to(ROOT).as_posix(): found
        for path in sources()
        if (found := [name for name in imported(path) if not is_allowed(name, rule_of(path))])
    }
    assert offenders == {}


# The layers of each folder, from the top down. A module or subfolder imports only from layers after
# its own; members of one layer do not import each other.
LAYERS = {
    "services": (
        "service_commands start | __main__ | command_table | host | cli worker | "
        "client decode deploy encode gateway guides kv_index local prefill scheduler"
    ),
    "services/gateway": (
        "service | app nats_api sites | reference | dialects operator | http | request | models | "
        "structured | output preparation receipts tenancy | observability text | "
        "images schemas streams | body_budget"
    ),
    "services/scheduler/residency": (
        "keeper policies | demand_policy lru_policy devices"
        " | parking_victims hosts wake_orders arrival_rates | view"
    ),
    "shared": (
        "engine backup | sites | pixels | kv_wire | model_registry fleet | lifecycle | tenancy | "
        "metrics receipts store | transport | config | regions secrets | "
        "block_hash device_health output subjects | messages | "
        "background grammar nats_urls telemetry | "
        "kv_layout numerics packing sizes tls tokenizer | allowance clock errors randomness"
    ),
    "shared/engine": (
        "worker | loop quantize checkpoint_check tenant_kv vision | executors step_counters | "
        "models | planning | pinned_prefixes weights | engine failed_steps layers token_masks | "
        "batching kv parallel sampling step_plan | announced_blocks codec features "
        "memory_shortage model_config step unretained_tenants"
    ),
}
MAX_FILES = 16


def folder_member(path: Path, folder: str) -> str | None:
    """The module or subfolder of `folder` that contains `path`; None if `path` is outside."""
    parts, inside = path.with_suffix("").parts, Path(folder).parts
    return (
        parts[len(inside)] if parts[: len(inside)] == inside and len(parts) > len(inside) else None
    )


def module_file(name: str) -> Path | None:
    """The file of a dotted name, which may end with a name that the module defines."""
    parts = name.split(".")
    while parts:
        for path in (Path(*parts).with_suffix(".py"), Path(*parts, "__init__.py")):
            if (ROOT / path).is_file():
                return path
        parts.pop()
    return None


@cache
def own_imports() -> list[tuple[Path, Path]]:
    """(file, file that it imports), relative to the root."""
    pairs = (
        (path.relative_to(ROOT), module_file(name)) for path in sources() for name in imported(path)
    )
    return sorted({(importer, found) for importer, found in pairs if found and found != importer})


def layers_of(folder: str) -> dict[str, int]:
    rows = LAYERS[folder].split("|")
    return {member: layer for layer, row in enumerate(rows) for member in row.split()}


@pytest.mark.parametrize("folder", LAYERS)
def test_every_member_of_a_folder_has_a_layer(folder: str) -> None:
    found = {folder_member(path.relative_to(ROOT), folder) for path in sources()}
    assert found - {None, "__init__"} == layers_of(folder).keys()


def test_no_import_goes_upward() -> None:
    offenders = []
    for folder in LAYERS:
        layer_of = layers_of(folder)
        for importer, found in own_imports():
            above, below = folder_member(importer, folder), folder_member(found, folder)
            is_placed = above != below and above in layer_of and below in layer_of
            if is_placed and layer_of[above] >= layer_of[below]:
                offenders.append(f"{folder}: {importer} imports {found}")
    assert offenders == []


def test_imports_have_no_cycles() -> None:
    """The files and subfolders of each folder form an acyclic graph."""
    graphs: dict[Path, dict[str, set[str]]] = {}
    for importer, found in own_imports():
        level = Path(os.path.commonpath([importer.parent, found.parent]))
        if found.name == "__init__.py" and found.parent == level:
            continue
        depth = 0 if level == Path() else len(level.parts)
        source, target = importer.parts[depth], found.parts[depth]
        if source != target:
            graphs.setdefault(level, {}).setdefault(source, set()).add(target)
    for level, graph in graphs.items():
        try:
            tuple(TopologicalSorter(graph).static_order())
        except CycleError as error:
            pytest.fail(f"{level}: {error.args[1]}")


def test_no_folder_exceeds_max_files() -> None:
    tests = [path for name in ("tests", "benchmarks") for path in (ROOT / name).rglob("*.py")]
    files = [path for path in (*sources(), *tests) if path.name != "__init__.py"]
    counts = Counter(path.parent.relative_to(ROOT).as_posix() for path in files)
    crowded = {folder: count for folder, count in counts.items() if count > MAX_FILES}
    assert crowded == {}


@in_one_test(
    ("file", "name"),
    [
        ("services/scheduler/service.py", "services.kv_index.index"),
        ("services/scheduler/service.py", "torch"),
        ("services/scheduler/service.py", "shared.engine.step"),
        ("services/gateway/service.py", "transformers"),
        ("services/gateway/service.py", "services.decode.service.DecodeService"),
        ("services/decode/service.py", "services.prefill.service"),
        ("shared/transport/bus.py", "shared.engine.step"),
        ("shared/transport/bus.py", "services.gateway"),
        ("shared/engine/step.py", "services.decode"),
        ("kernels/gpu/rows/rms_norm.py", "shared.packing"),
        ("shared/packing.py", "tests.support.servers"),
    ],
)
def test_forbidden_import_is_rejected(file: str, name: str) -> None:
    assert not is_allowed(name, rule_of(ROOT / file))


@pytest.mark.parametrize(
    ("modules", "excluded"),
    [
        ("gateway.service kv_index.service scheduler.service", "torch transformers triton"),
        # several of them beside a gateway, each of which takes the memory of its modules
        (
            "gateway.dialects.preparation_process gateway.preparation.encoding_process "
            "gateway.structured.grammars.check_process",
            "structlog rich nats redis litestar",
        ),
    ],
    ids=["services", "preparation"],
)
def test_process_does_not_load_what_it_never_uses(modules: str, excluded: str) -> None:
    code = (
        f"import sys, {', '.join(f'services.{each}' for each in modules.split())}\n"
        f"print(sorted({set(excluded.split())} & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == "[]"


def test_kernels_stays_an_empty_package() -> None:
    """transformers imports any package named `kernels` that it finds on the path."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""
