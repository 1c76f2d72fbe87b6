"""The level of instructions that torch's libraries use, from features and limits."""

from __future__ import annotations

import pytest

from kernels.cpu.simd import library_level
from kernels.cpu.simd.library_level import LEVELS, effective_level, equal_level, library_name

SSE = frozenset({"sse2"})


def features_of(level: str) -> frozenset[str]:
    return SSE | library_level._needs(level)


@pytest.mark.parametrize("level", LEVELS)
def test_level_is_that_of_the_features(level: str) -> None:
    assert effective_level(features_of(level), {}) == level


@pytest.mark.parametrize(
    ("limit", "level"),
    [
        ("AVX2", "avx2"),
        ("avx512_core_vnni", "avx512_vnni"),
        ("AVX10_1_512", "avx512_fp16"),
        ("AVX512_CORE_AMX_FP16", "avx512_amx"),  # beyond this host's features
        ("AVX2_VNNI_2", "avx2_vnni"),  # contains a level that these features have
        ("ALL", "avx512_amx"),
        ("no such level", "avx512_amx"),
    ],
)
def test_limit_lowers_the_level(limit: str, level: str) -> None:
    features = features_of("avx512_amx")
    assert effective_level(features, {"ONEDNN_MAX_CPU_ISA": limit}) == level
    other = {"DNNL_MAX_CPU_ISA": limit}
    assert effective_level(features, other) == level
    assert effective_level(features, {**other, "ONEDNN_MAX_CPU_ISA": "AVX2"}) == "avx2"


def test_levels_of_equal_bits_are_listed_by_dtype() -> None:
    assert equal_level("avx512_vnni", "bfloat16") == equal_level("avx512", "bfloat16")
    assert equal_level("avx512_amx", "bfloat16") != equal_level("avx512_bf16", "bfloat16")
    assert equal_level("avx512_fp16", "float16") != equal_level("avx512_bf16", "float16")
    assert equal_level("avx512_amx_fp16", "float32") == "avx512_amx_fp16", "it was not compared"


def test_other_architectures_are_named_by_all_their_features() -> None:
    one, other = frozenset({"neon", "bf16"}), frozenset({"neon"})
    assert effective_level(one, {}) != effective_level(other, {})


def test_settings_of_the_libraries_change_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in library_level.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    names = {library_name("float32")}
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR"):
        for value in ("BF16", "COMPATIBLE"):
            monkeypatch.setenv(name, value)
            names.add(library_name("float32"))
        monkeypatch.delenv(name)
    assert len(names) == 5
