"""Which codec a worker offers and uses for KV on TCP."""

from __future__ import annotations

from pathlib import Path

import numba
import pytest

from kernels.cpu import probe
from services.worker.data_plane import CodecLoading
from shared.config import WorkerConfig, check
from shared.engine.kv.frame_codec import load_codec
from shared.errors import ConfigError


def config(kv_compression: str) -> WorkerConfig:
    return WorkerConfig(
        process_id="decode-1",
        nats_url="nats://decode-1:secret@127.0.0.1:4222",
        model_dir=Path("shared/demo_model"),
        kv_compression=kv_compression,
    )


@pytest.mark.parametrize(
    ("kv_compression", "dtype", "name"),
    [
        ("auto", "bfloat16", "bf16-high-bytes"),
        ("auto", "float16", None),
        ("auto", "float32", None),
        ("off", "bfloat16", None),
    ],
)
def test_bf16_has_a_codec_unless_it_is_off(
    kv_compression: str, dtype: str, name: str | None
) -> None:
    codec = load_codec(kv_compression, dtype)
    assert (None if codec is None else codec.name) == name


def test_host_that_cannot_compile_has_no_codec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_codec("auto", "bfloat16")  # its loops are imported, with the right directory
    no_directory = tmp_path / "file"
    no_directory.touch()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(no_directory))
    monkeypatch.setattr(probe, "frames_failure", probe.frames_failure.__wrapped__)  # not remembered
    assert load_codec("auto", "bfloat16") is None


def test_unknown_kv_compression_is_rejected() -> None:
    with pytest.raises(ConfigError, match="kv_compression 'always' is none of auto, off"):
        check(config("always"))


async def test_both_ports_have_the_codec_that_was_begun() -> None:
    codec = CodecLoading("auto")
    codec.begin()
    found = await codec.codec("bfloat16")
    assert found is not None
    assert found is await codec.codec("bfloat16")
    assert await codec.codec("float8_e4m3fn") is None
