"""Foreign or damaged files: checkpoints, caches, local state.

Each is read, or rejected with one clear error, in bounded time and memory.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from services.gateway.tenancy.api_keys import ApiKeys
from services.gateway.tenancy.errors import UnknownTenant
from services.gateway.text.decoding.detokenizer import decode_with_offsets
from services.gateway.text.model_files import ModelFiles
from services.local.credentials import Credential
from services.local.join import signalled_process
from services.local.state import LocalClusterState, StateDir, running_cluster
from shared.engine.model_config.checkpoint_form import TEXT_PART
from shared.engine.models import FAMILIES
from shared.engine.models.checkpoint_config import read_config
from shared.engine.weights.checkpoint_tensors import FormedTensors
from shared.engine.weights.load import open_checkpoint, weights_digest
from shared.engine.weights.shared_file import (
    FileIdentity,
    PackedFile,
    build_packed,
    open_packed,
    packed_path,
)
from shared.errors import (
    AuthenticationFailed,
    CheckpointError,
    ConfigError,
    DependencyUnavailable,
    HearthError,
)
from shared.tenancy.tenant import TENANTS, api_key_record, digest_of
from tests.fuzz.mutations import anything, spoiled, torn
from tests.fuzz.profile import fuzz
from tests.support.services.model_dir import write_model_dir
from tests.support.world.clock import VirtualClock, run
from tests.support.world.store import MemoryStore

MAX_MESSAGE_CHARS = 200_000  # an error may repeat a name
SHAPE: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "sliding_window": 21,
    "rope_theta": 10_000.0,
    "eos_token_id": [2, 3],
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "layer_types": None,
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 0.7},
    {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
        "long_factor": [1.5, 2.0, 3.0, 5.0, 9.0, 17.0],
    },
    {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"factor": 2.0}},
)


def configs() -> list[dict[str, Any]]:
    found = [
        {"architectures": [name], **SHAPE, "rope_scaling": rope}
        for name in FAMILIES
        for rope in (None, *ROPES)
    ]
    return found + [
        {"architectures": [each["architectures"][0]], "text_config": each} for each in found
    ]


def in_json(trees: list[Any]) -> st.SearchStrategy[bytes]:
    good = [json.dumps(tree).encode() for tree in trees]
    bad = spoiled(trees, has_bytes=False).map(lambda tree: json.dumps(tree).encode())
    return bad | bad | bad | torn(good) | anything


def reads_or_rejects_clearly(read: Callable[[], object], *errors: type[HearthError]) -> None:
    """`read` succeeds, or raises one of `errors` with a clear message."""
    try:
        read()
    except errors as error:
        assert error.message
        assert len(error.message) < MAX_MESSAGE_CHARS, error.message[:200]


@cache
def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="hearth-fuzz-"))


# ── a checkpoint's configuration and tokenizer ───────────────────────────────────────────────────


@fuzz(160)
@given(in_json(configs()), st.none() | in_json([{"eos_token_id": [2, 3]}, {"eos_token_id": 2}]))
def test_config(config: bytes, generation: bytes | None) -> None:
    folder = scratch() / "config"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (folder / "generation_config.json").write_bytes(generation)
    reads_or_rejects_clearly(lambda: read_config(folder), CheckpointError)


GENERATION = {
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "max_new_tokens": 99,
    "eos_token_id": [2, 0],
}


@cache
def model_dir() -> Path:
    return write_model_dir(scratch() / "good")


@st.composite
def spoilt_model_files(draw: st.DrawFn) -> dict[str, bytes]:
    good = {each.name: each.read_bytes() for each in model_dir().iterdir()}
    name = draw(st.sampled_from(("tokenizer.json", "tokenizer_config.json", *TEXT_FILES)))
    if name == "chat_template.jinja":
        template = json.loads(good["tokenizer_config.json"])["chat_template"].encode()
        deep = b"{{ " + b"(" * 5000 + b"1" + b")" * 5000 + b" }}"
        return good | {name: draw(torn([template]) | anything | st.just(deep))}
    tree = GENERATION if name == "generation_config.json" else json.loads(good[name])
    return good | {name: draw(in_json([tree]))}


TEXT_FILES = ("generation_config.json", "config.json", "chat_template.jinja")


@fuzz(120)
@given(st.deferred(spoilt_model_files))
def test_gateway_model_files(files: dict[str, bytes]) -> None:
    folder = scratch() / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)

    def read() -> None:
        found = ModelFiles(folder)
        token_ids = found.tokenizer.encode(["hello world"])
        decode_with_offsets(found.tokens, token_ids[:50])

    reads_or_rejects_clearly(read, ConfigError)


# ── weights ──────────────────────────────────────────────────────────────────────────────────────


@cache
def shards() -> tuple[bytes, bytes]:
    def tensors(number: int) -> dict[str, torch.Tensor]:
        return {
            f"model.layers.{number}.weight": torch.arange(12.0).reshape(3, 4).bfloat16(),
            f"model.layers.{number}.bias": torch.zeros(4),
            f"language_model.model.layers.{number}.scale": torch.ones(()),
        }

    return save(tensors(0)), save(tensors(1))


def safetensors_of(tree: Any, payload: bytes) -> bytes:
    header = json.dumps(tree).encode()
    return struct.pack("<Q", len(header)) + header + payload


@st.composite
def spoilt_shard(draw: st.DrawFn) -> bytes:
    good = shards()[1]
    (size,) = struct.unpack_from("<Q", good)
    tree, payload = json.loads(good[8 : 8 + size]), good[8 + size :]
    lies = spoiled([tree], has_bytes=False).map(lambda each: safetensors_of(each, payload))
    sizes = st.sampled_from((0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1))
    wrong = sizes.map(lambda each: struct.pack("<Q", each) + good[8:])
    return draw(lies | lies | lies | wrong | torn([good]) | anything)


INDEX = {
    "metadata": {"total_size": 100},
    "weight_map": {
        f"{name}.layers.{number}.{kind}": f"model-{number + 1}-of-2.safetensors"
        for number in (0, 1)
        for name, kind in (
            ("model", "weight"),
            ("model", "bias"),
            ("language_model.model", "scale"),
        )
    },
}


@fuzz(120)
@given(st.none() | spoilt_shard(), st.none() | in_json([INDEX]))
def test_weights(shard: bytes | None, index: bytes | None) -> None:
    folder = scratch() / "weights"
    folder.mkdir(exist_ok=True)
    first, second = shards()
    written = {
        "model-1-of-2.safetensors": first,
        "model-2-of-2.safetensors": second if shard is None else shard,
        "model.safetensors.index.json": json.dumps(INDEX).encode() if index is None else index,
    }
    for name, content in written.items():
        (folder / name).write_bytes(content)

    def read() -> None:
        with open_checkpoint(folder) as tensors:
            weights_digest(FormedTensors(tensors, TEXT_PART), b"")

    reads_or_rejects_clearly(read, CheckpointError)


# ── the packed weights that processes share ──────────────────────────────────────────────────────

KEY = "k" * 32


@cache
def packed() -> tuple[bytes, int]:
    """A complete file and the time that seals it."""
    folder = scratch() / "packed"
    folder.mkdir()
    (folder / "source").write_bytes(b"weights")

    def write(writer: Any) -> str:
        for number in range(3):
            writer.append(f"span {number}", torch.full((100 + number,), number, dtype=torch.uint8))
        return "revision"

    path = packed_path(folder, KEY)
    source = FileIdentity.of(folder / "source")
    build_packed(path, KEY, (source,), write, num_expected_bytes=1000)
    return path.read_bytes(), path.stat().st_mtime_ns


def spans_of(opened: PackedFile) -> dict[str, bytes]:
    return {name: bytes(opened.bytes_of(name).numpy()) for name in opened.header.spans}


EXPECTED = {f"span {number}": bytes([number]) * (100 + number) for number in range(3)}


@fuzz(120)
@given(st.deferred(lambda: torn([packed()[0]]) | anything))
def test_packed_weights_are_never_wrong(content: bytes) -> None:
    """Without the sealing mtime, as if the file was written to afterwards."""
    path = packed_path(scratch() / "packed", KEY)
    path.write_bytes(content)
    opened = open_packed(path, KEY)
    assert opened is None or spans_of(opened) == EXPECTED


def _resealed(change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A file with another header, and a matching trailer."""

    whole, _ = packed()
    _, size, magic = struct.unpack_from("<16sQ8s", whole, len(whole) - 32)
    start = len(whole) - 32 - size
    header = json.dumps(change(json.loads(whole[start:-32]))).encode()
    trailer = struct.pack("<16sQ8s", xxhash.xxh3_128_digest(header), len(header), magic)
    return whole[:start] + header + trailer


@st.composite
def other_headers(draw: st.DrawFn) -> bytes:
    def change(tree: dict[str, Any]) -> Any:
        return draw(spoiled([tree], has_bytes=False))

    return _resealed(change)


@fuzz(120)
@given(st.deferred(other_headers))
def test_packed_weights_with_another_header(content: bytes) -> None:
    path = packed_path(scratch() / "packed", KEY)
    path.write_bytes(content)
    opened = open_packed(path, KEY)
    if opened is not None:
        for name, span in opened.header.spans.items():
            assert opened.bytes_of(name).numel() == span.num_bytes
    source = FileIdentity.of(scratch() / "packed" / "source")
    path.unlink()
    (path.with_name("other.packed")).write_bytes(content)

    def write(writer: Any) -> str:
        for name, data in EXPECTED.items():
            writer.append(name, torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return "revision"

    built = build_packed(path, KEY, (source,), write, num_expected_bytes=1000)
    assert spans_of(built) == EXPECTED


# ── Redis and the local cluster's directory ──────────────────────────────────────────────────────


TENANT = {
    "tenant_id": "bad",
    "requests_per_min": 60,
    "concurrency": 0,
    "allowed_models": ["m"],
    "allowed_regions": None,
    "priority": -1,
    "weight": 0.5,
    "is_zero_retention": True,
}


@fuzz(80)
@given(in_json([TENANT]), st.dictionaries(st.binary(), st.binary(), max_size=3))
def test_records_of_tenants_and_api_keys(record: bytes, more: dict[bytes, bytes]) -> None:
    store = MemoryStore()
    sound = b'{"tenant_id":"good"}'
    store.data = {
        api_key_record(digest_of("bad")): {b"tenant_id": b"bad"},
        api_key_record(digest_of("worse")): {b"tenant_id": b"good", b"expires_at": record, **more},
        api_key_record(digest_of("good")): {b"tenant_id": b"good"},
        TENANTS: {b"bad": record, b"good": sound},
    }

    async def look_up_keys() -> None:
        keys = ApiKeys(store, VirtualClock())
        for name in ("bad", "worse"):
            try:
                found = await keys.tenant_of(f"Bearer {name}")
                assert found.tenant_id in ("bad", "good")
            except (DependencyUnavailable, AuthenticationFailed, UnknownTenant):
                pass
        assert (await keys.tenant_of("Bearer good")).tenant_id == "good"
        await asyncio.sleep(0)
        assert not keys._lookups

    run(look_up_keys())


STATE = LocalClusterState(
    url="http://127.0.0.1:8000",
    api_key="key",
    nats_host="127.0.0.1",
    nats_port=4222,
    credentials=(Credential("decode", "decode-1"),),
)


@fuzz(80)
@given(in_json([msgspec.to_builtins(STATE)]))
def test_cluster_state(content: bytes) -> None:
    parent = scratch() / "clusters"
    directory = StateDir.create(parent)
    (directory.path / "cluster.json").write_bytes(content)
    try:
        reads_or_rejects_clearly(lambda: running_cluster(parent), ConfigError)
    finally:
        directory.close(retain_logs=False)


@fuzz(40)
@given(torn([b"4711\n"]) | anything | st.integers(-(2**70), 2**70).map(lambda n: str(n).encode()))
def test_only_a_valid_pid_is_signalled(content: bytes) -> None:
    """-1 would signal every process of the user."""
    path = scratch() / "nats.pid"
    path.write_bytes(content)
    try:
        process_id = signalled_process(path)
    except ConfigError as error:
        assert "cannot reload" in error.message
    else:
        assert 1 < process_id < 2**22
