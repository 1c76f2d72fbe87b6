"""The instructions that torch's libraries compute with: those of the host, up to their limits.

oneDNN multiplies weights. MKL computes tanh, exp and erf, and where no loops are compiled FP32
products. Levels of oneDNN (named as in its "CPU dispatcher control", without `_core`) were compared
on a Xeon with AMX, each forced in turn, for N and K from 33 to 11,008 and 1 to 200 rows:
`EQUAL_BITS` lists those that gave equal bits.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch
from llvmlite import binding

# Each level: the one that it contains, and the features that it adds, as LLVM names them.
LEVELS: dict[str, tuple[str, tuple[str, ...]]] = {
    "sse41": ("", ("sse4.1",)),
    "avx": ("sse41", ("avx",)),
    "avx2": ("avx", ("avx2",)),
    "avx2_vnni": ("avx2", ("avxvnni",)),
    "avx2_vnni_2": ("avx2_vnni", ("avxvnniint8", "avxneconvert")),
    "avx512": ("avx2", ("avx512f", "avx512bw", "avx512vl", "avx512dq")),
    "avx512_vnni": ("avx512", ("avx512vnni",)),
    "avx512_bf16": ("avx512_vnni", ("avx512bf16",)),
    "avx512_fp16": ("avx512_bf16", ("avx512fp16", "avxvnni")),
    "avx512_amx": ("avx512_fp16", ("amx-tile", "amx-int8", "amx-bf16")),
    "avx512_amx_fp16": ("avx512_amx", ("amx-fp16",)),
    "avx10_2": ("avx512_fp16", ("avx10.2",)),
    "avx10_2_amx_2": ("avx10_2", ("amx-tile", "amx-fp8")),
}
SYNONYMS = {
    "avx512_core": "avx512",
    **{f"avx512_core_{name}": f"avx512_{name}" for name in ("vnni", "bf16", "fp16", "amx")},
    "avx512_core_amx_fp16": "avx512_amx_fp16",
    "avx10_1_512": "avx512_fp16",
    "avx10_1_512_amx": "avx512_amx",
    "avx10_1_512_amx_fp16": "avx512_amx_fp16",
    "avx10_2_512": "avx10_2",
    "avx10_2_512_amx_2": "avx10_2_amx_2",
}
# dtype -> level -> the level whose bits it gives.
EQUAL_BITS: dict[str, dict[str, str]] = {
    "bfloat16": {
        "avx512_vnni": "avx512",
        "avx512_fp16": "avx512_bf16",
    },
    "float16": {
        "avx512_vnni": "avx512",
        "avx512_bf16": "avx512",
        "avx512_amx": "avx512_fp16",
    },
    "float32": {
        "avx512_vnni": "avx512",
        "avx512_bf16": "avx512",
        "avx512_fp16": "avx512",
        "avx512_amx": "avx512",
    },
}
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN reads the first that is set
# What else changes how the libraries multiply.
SETTINGS = (
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    *("ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS"),
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
)
VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd"}


def library_name(dtype: str = "") -> str:
    """Returns words for what determines the bits of the libraries' results in a torch dtype.
    Without a dtype they name what determines their layouts of weights.
    """
    capability = torch.backends.cpu.get_cpu_capability().lower()
    parts = [capability, equal_level(onednn_level(), dtype), mkl_path()]
    settings = "".join(f"{name}={os.environ[name]}," for name in SETTINGS if os.environ.get(name))
    if settings:
        parts.append(_short_digest(settings))
    return "-".join(parts)


def equal_level(level: str, dtype: str) -> str:
    """The name that levels of equal bits share."""
    return EQUAL_BITS.get(dtype, {}).get(level, level)


@cache
def onednn_level() -> str:
    """The level that oneDNN uses in this process; none: torch is built without it."""
    if not torch.backends.mkldnn.is_available():
        return "none"
    return effective_level(host_features(), os.environ)


@cache
def has_amx_gemm() -> bool:
    """Whether the library multiplies BF16 with tiles."""
    has_level = onednn_level().startswith(("avx512_amx", "avx10_2"))
    return has_level and "amx-bf16" in host_features()


@cache
def has_bf16_gemm() -> bool:
    """Whether the library multiplies BF16 without conversion to FP32."""
    return "avx512_bf16" in _contained(onednn_level())


def effective_level(features: frozenset[str], environ: Mapping[str, str]) -> str:
    """The highest level that the features and the limit allow. Other architectures than x86-64 have
    a digest of all their features: nothing is known of equal bits there.
    """
    if not any(name.startswith("sse") for name in features):
        return f"{platform.machine()}_{_short_digest(','.join(sorted(features)))}"
    limit = next((environ[name] for name in LIMITS if environ.get(name)), "").lower()
    limit = SYNONYMS.get(limit, limit)
    allowed = _contained(limit) if limit in LEVELS else set(LEVELS)  # others do not limit
    found = "none"
    for level in LEVELS:
        if level in allowed and _needs(level) <= features:
            found = level
    return found


@cache
def host_features() -> frozenset[str]:
    """LLVM's names of the host's features that this process may use."""
    found = {name for name, is_there in binding.get_host_cpu_features().items() if is_there}
    if "amx-tile" in found and not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        found = {name for name in found if not name.startswith("amx")}
    return frozenset(found)


def _contained(level: str) -> set[str]:
    """The level and all that it contains."""
    found = set()
    while level in LEVELS:
        found.add(level)
        level = LEVELS[level][0]
    return found


def _needs(level: str) -> set[str]:
    return {name for each in _contained(level) for name in LEVELS[each][1]}


@cache
def mkl_path() -> str:
    """MKL chooses by vendor and instructions. On Intel its paths of AVX-512 give equal bits: that
    of Skylake and the newest were compared on a Xeon.
    """
    if not torch.backends.mkl.is_available():
        return "no_mkl"
    vendor, level = _vendor(), effective_level(host_features(), {})
    is_one_path = vendor == "intel" and level.startswith("avx512")
    return f"{vendor}_{'avx512' if is_one_path else level}"


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    return VENDORS.get(names[0], "other") if names else "other"


def _short_digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
