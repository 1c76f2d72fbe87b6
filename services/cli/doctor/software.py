"""Checks of what is installed: Python, packages, servers, the GPU's driver, the model hub."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from services.cli.doctor.check import Check
from services.local.gpus import count_by_driver, count_gpus
from services.local.servers import find_server
from shared.device_health.nvml_device import HealthUnavailable, load_nvml, nvml_problem
from shared.errors import ConfigError
from shared.lifecycle.release import DISTRIBUTION, installed_release

DRIVER = Path("/proc/driver/nvidia/version")
VERSION_TIMEOUT_S = 5.0
NVML_TIMEOUT_S = 5.0
HEALTH_ADVICE = (
    "Workers serve all the same. In a container, give it the driver's libraries (the capability "
    "utility of NVIDIA's runtime)."
)
CUDA_ADVICE = "Install a build of PyTorch with CUDA; until then workers use the CPU."
_VERSION = re.compile(r"v?=?(\d+\.\d+\.\d+)")


def check_software(*, has_nats: bool, has_redis: bool) -> Iterator[Check]:
    """Yields the checks. Servers of which a URL is given need no binary here."""
    yield python_check()
    yield packages_check()
    yield gpu_check(count_by_driver(), driver_version(DRIVER), torch_version())
    if count_by_driver():
        yield health_check(_health_problem())
    yield server_check("nats-server", is_needed=not has_nats)
    yield server_check("redis-server", is_needed=not has_redis)
    yield hub_check()


def python_check() -> Check:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    try:
        needed = importlib.metadata.metadata(DISTRIBUTION)["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        needed = ""
    if SpecifierSet(needed).contains(version, prereleases=True):
        return Check("Python", "ok", version)
    return Check("Python", "fail", version, f"Hearth needs Python {needed}.")


def packages_check() -> Check:
    """Checks the versions of the packages that Hearth's own metadata names."""
    try:
        needed = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        advice = "Install it in its environment: scripts/up, or pip install -e ."
        return Check("packages", "warn", "hearth runs from a tree that is not installed", advice)
    wrong = [each for each in map(_problem, needed) if each]
    if not wrong:
        text = f"hearth {installed_release()}, torch {torch_version() or 'none'}; all as required"
        return Check("packages", "ok", text)
    advice = "Run scripts/up again, or pip install the versions that are named."
    return Check("packages", "fail", "; ".join(wrong), advice)


def _problem(text: str) -> str:
    """Returns what is wrong with the installed version of a requirement, or ""."""
    from packaging.requirements import Requirement

    needed = Requirement(text)
    if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
        return ""
    try:
        found = importlib.metadata.version(needed.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{needed.name} is missing"
    is_right = needed.specifier.contains(found, prereleases=True)
    return "" if is_right else f"{needed.name} {found} is not {needed.specifier}"


def torch_version() -> str:
    """Returns the version with its build, such as 2.9.0+cpu, or "" without torch."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def gpu_check(num_driver_devices: int, driver: str, torch: str) -> Check:
    """Checks that torch shows the devices that the driver has."""
    if not num_driver_devices:
        text = f"none{f' (driver {driver}, no device)' if driver else ''}: workers use the CPU"
        return Check("GPU", "ok", text)
    num_devices = count_gpus()
    text = f"{num_driver_devices} by driver {driver or 'of unknown version'}"
    if num_devices:
        return Check("GPU", "ok", f"{text}, {num_devices} by torch {torch}")
    return Check("GPU", "warn", f"{text}, but none by torch {torch}", CUDA_ADVICE)


def health_check(problem: str) -> Check:
    if problem:
        return Check("GPU health", "warn", f"not watched: {problem}", HEALTH_ADVICE)
    return Check("GPU health", "ok", "Xid errors, ECC errors and throttling are watched (NVML)")


def _health_problem() -> str:
    """Asks NVML on a thread, as it may hang with a device that is sick."""
    found = [f"NVML has not answered for {NVML_TIMEOUT_S:g} s"]

    def ask() -> None:
        try:
            found.append(nvml_problem(load_nvml()))
        except HealthUnavailable as error:
            found.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(NVML_TIMEOUT_S)
    return found[-1]


def driver_version(path: Path) -> str:
    """Returns the version of the kernel's NVIDIA driver, or "" without one."""
    try:
        text = path.read_text()
    except OSError:
        return ""
    found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", text)
    return found[1] if found else "of unknown version"


def server_check(name: str, *, is_needed: bool) -> Check:
    try:
        binary = find_server(name)
    except ConfigError as error:
        text = f"none: {'`hearth up` starts one' if is_needed else 'a running one is given'}"
        return Check(name, "fail" if is_needed else "ok", text, error.message if is_needed else "")
    return Check(name, "ok", f"{_version_of(binary)} in {binary}")


def _version_of(binary: str) -> str:
    try:
        told = subprocess.run(
            [binary, "--version"],
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return "of unknown version"
    found = _VERSION.search(told.stdout + told.stderr)
    return found[1] if found else "of unknown version"


def hub_check() -> Check:
    """Checks the cache and the token of huggingface_hub."""
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    num_models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    nearest = next(each for each in (cache, *cache.parents) if each.exists())
    text = f"{num_models} models in {cache}"
    if not os.access(nearest, os.W_OK):
        advice = "Give this user the folder, or set HF_HOME: models cannot be downloaded."
        return Check("model hub", "warn", f"{text}, which cannot be written", advice)
    token = "a token" if get_token() else "no token (HF_TOKEN: for gated and private models)"
    mode = ", offline" if constants.HF_HUB_OFFLINE else ""
    return Check("model hub", "ok", f"{text}, {token}{mode}")
