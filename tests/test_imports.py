"""Who may import whom: services do not know each other, and torch stays in the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASE = {"msgspec", "structlog", "nats", "redis", "uvloop", "xxhash", "prometheus_client"}
TENSORS = {"torch", "triton", "numpy", "numba", "safetensors", "transformers", "zstandard"}
WEB = {"litestar", "uvicorn", "granian", "jinja2", "tiktoken", "tokenizers", "httpx"}
TERMINAL = {"typer", "rich", "click", "httpx"}
HUB = {"huggingface_hub"}


@dataclass(frozen=True)
class Rule:
    """`inside` are dotted prefixes of our own modules; `outside` are foreign top-level packages."""

    inside: tuple[str, ...]
    outside: frozenset[str]
    but_not: tuple[str, ...] = ()


def rule(inside: str, *outside: set[str], but_not: str = "") -> Rule:
    return Rule(tuple(inside.split()), frozenset().union(*outside), tuple(but_not.split()))


# The longest matching place decides.
RULES = {
    "kernels": rule("kernels", {"torch", "triton", "numpy", "numba", "llvmlite"}),
    "shared": rule("shared", BASE, but_not="shared.engine"),
    "shared/engine": rule("shared kernels", BASE, TENSORS),
    "services/scheduler": rule(
        "services.scheduler shared", BASE, {"numpy", "numba"}, but_not="shared.engine"
    ),
    "services/kv_index": rule("services.kv_index shared", BASE, but_not="shared.engine"),
    "services/gateway": rule("services.gateway shared", BASE, WEB, but_not="shared.engine"),
    "services/prefill": rule("services.prefill shared", BASE),
    "services/decode": rule("services.decode shared", BASE),
    "services/cli": rule(
        "services.cli services.local services.client shared",
        *(BASE, TERMINAL),
        but_not="shared.engine",
    ),
    "services/cli/bundle_commands.py": rule("services.cli services.local shared", BASE, TERMINAL),
    "services/cli/warm_command.py": rule("services.cli services.local shared", BASE, TERMINAL),
    "services/cli/compression_progress.py": rule("services.cli shared", BASE, TERMINAL),
    "services/client": rule("services.client shared", BASE, TERMINAL, but_not="shared.engine"),
    "services/local": rule("services.local shared", BASE, TERMINAL, HUB, but_not="shared.engine"),
    "services": rule("services shared", BASE, TERMINAL),
}


def sources() -> list[Path]:
    folders = (ROOT / name for name in ("kernels", "shared", "services"))
    found = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    assert len(found) > 40
    return found


def imported(path: Path) -> Iterator[str]:
    """Dotted names as written; `from a import b` gives `a.b`, since b may be a module."""
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
        return is_within(name, rule.inside) and not is_within(name, rule.but_not)
    return top in sys.stdlib_module_names or top in rule.outside


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_imports_what_its_folder_may(path: Path) -> None:
    rule = rule_of(path)
    assert [name for name in imported(path) if not is_allowed(name, rule)] == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("services/scheduler/service.py", "services.kv_index.index"),
        ("services/scheduler/service.py", "torch"),
        ("services/scheduler/service.py", "shared.engine.runner"),
        ("services/gateway/service.py", "transformers"),
        ("services/gateway/service.py", "services.decode.service.DecodeService"),
        ("services/decode/service.py", "services.prefill.service"),
        ("shared/transport/bus.py", "shared.engine.runner"),
        ("shared/transport/bus.py", "services.gateway"),
        ("shared/engine/runner.py", "services.decode"),
        ("kernels/gpu/rows/rms_norm.py", "shared.packing"),
        ("shared/packing.py", "tests.servers"),
    ],
)
def test_the_rules_forbid(file: str, name: str) -> None:
    assert not is_allowed(name, rule_of(ROOT / file))


@pytest.mark.parametrize("service", ["gateway", "scheduler", "kv_index"])
def test_torch_is_not_even_loaded(service: str) -> None:
    code = (
        f"import sys, services.{service}.service\n"
        "print(sorted({'torch', 'transformers', 'triton'} & set(sys.modules)))"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == "[]"


def test_kernels_stays_an_empty_package() -> None:
    """transformers imports a package of that name where it finds one on the path."""
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""
