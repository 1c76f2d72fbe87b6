"""Bundles: how small, and how fast to make and to load. See `__main__.py`."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import torch

from benchmarks.compression.llama_weights import STATISTICS, WHOLE_MODEL, weights, write_layers
from benchmarks.report import Bar, Row, at_least, at_most
from services.cli.cluster.service_options import DEMO_MODEL_DIR
from shared.engine.codec.compress import compress_folder
from shared.engine.codec.decompress import decompress_folder
from shared.engine.codec.manifest import Manifest
from shared.engine.codec.model_folder import digest_of
from shared.engine.codec.savings_report import KindRow, rows_by_kind, tensors_of, total_row
from shared.engine.codec.tensor import EncodedTensor, decode_tensor, encode_tensor
from shared.engine.codec.threads import coding_threads
from shared.engine.parallel.cuts import WHOLE
from shared.engine.weights.load import open_checkpoint

CODEC_SHAPE = (14_336, 4096)  # gate_proj: 117 MB
MAX_BITS, MAX_EXCESS, MIN_SMALLER = 11.0, 0.03, 0.28
MIN_COMPRESS_MBPS, MIN_DECODE_MBPS = 150.0, 1000.0


class Silent:
    def expect(self, num_bytes: int) -> None: ...

    def advance(self, what: str, num_bytes: int) -> None: ...


def at_rest(
    models: list[Path], *, num_layers: int, rows_divisor: int, rounds: int, num_threads: int
) -> tuple[list[Row], list[Bar]]:
    rows: list[Row] = []
    bars: list[Bar] = []
    for source in (DEMO_MODEL_DIR, *models):
        case = source.resolve().name
        found, held, _ = bundle_rows(case, source, rounds, num_threads, has_speeds=False)
        rows += found
        bars += held
    for case, statistics_of in STATISTICS.items():
        is_usual = case == "usual"
        with tempfile.TemporaryDirectory(prefix="hearth-synthetic-") as folder:
            source = Path(folder, "model")
            write_layers(source, statistics_of, num_layers=num_layers, rows_divisor=rows_divisor)
            name = f"8B shapes, {case}"
            found, _, manifest = bundle_rows(name, source, rounds, num_threads, has_speeds=is_usual)
        total = whole_model(manifest)
        rows += [*found, size_row(name, total)]
        bars += size_bars(name, total, 1 - total.saved_share)
    with coding_threads(num_threads) as executor:
        rows += codec_rows(rows_divisor, rounds, executor)
    rate = {row["kind"]: row["mb_per_s"] for row in rows if "mb_per_s" in row}
    loaded = rate["open_checkpoint, bundle"]
    bars.append(at_least("hearth compress", rate["hearth compress"], MIN_COMPRESS_MBPS, "MB/s"))
    bars.append(at_least("loading a bundle", loaded, MIN_DECODE_MBPS, "MB/s"))
    return rows, bars


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────


def size_row(case: str, row: KindRow) -> Row:
    return {
        "case": case,
        "kind": row.kind,
        "weights_m": round(row.num_weights / 1e6, 2),
        "bits_per_weight": round(row.bits_per_weight, 4),
        "entropy_bits": round(row.entropy_bits_per_weight, 4),
        "over_entropy": round(row.excess_over_entropy, 4),
        "smaller": round(row.saved_share, 4),
    }


def size_rows(case: str, manifest: Manifest) -> list[Row]:
    tensors = tensors_of(manifest)
    coded = total_row(tensor for tensor in tensors if tensor.coded_planes)
    rows = [*rows_by_kind(tensors), total_row(tensors)]
    coded.kind = "all that is coded"
    return [size_row(case, row) for row in (*rows, coded)]


def whole_model(manifest: Manifest) -> KindRow:
    """Returns the size of Llama 3.1 8B: each kind has the bits per weight measured on a part of
    it.
    """
    measured = {row.kind: row for row in rows_by_kind(tensors_of(manifest))}
    total = KindRow("whole model, by shape", "BF16")
    for kind, shape, count in WHOLE_MODEL:
        row, num_weights = measured[kind], count * int(np.prod(shape))
        share = num_weights / row.num_weights
        total.num_tensors += count
        total.num_coded += count if row.num_coded else 0
        total.num_weights += num_weights
        total.num_bytes += round(share * row.num_bytes)
        total.num_stored_bytes += round(share * row.num_stored_bytes)
        total.entropy_bytes += round(share * row.entropy_bytes)
        total.num_raw_bytes += round(share * row.num_raw_bytes)
    return total


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def size_bars(case: str, total: KindRow, disk_share: float) -> list[Bar]:
    return [
        at_most(f"{case}: bits a weight at rest", total.bits_per_weight, MAX_BITS, "bits"),
        at_most(f"{case}: over the entropy", total.excess_over_entropy, MAX_EXCESS, ""),
        at_least(f"{case}: bundle smaller by", 1 - disk_share, MIN_SMALLER, ""),
    ]


# ── speeds ───────────────────────────────────────────────────────────────────────────────────────


def timed(
    case: str,
    what: str,
    num_bytes: int,
    rounds: int,
    run: Callable[[], object],
    before: Callable[[], object] = lambda: None,
) -> Row:
    """Runs once before the measured rounds: numba compiles, files enter the page cache."""
    before()
    run()
    walls, cpus = [], []
    for _ in range(rounds):
        before()
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "case": case,
        "kind": what,
        "mb_per_s": round(num_bytes / statistics.median(walls) / 1e6, 1),
        "mb_per_cpu_s": round(num_bytes / statistics.median(cpus) / 1e6, 1),
    }


def codec_rows(rows_divisor: int, rounds: int, executor: Executor) -> list[Row]:
    """Measures the codec from memory to memory, without checksums."""
    shape = (CODEC_SHAPE[0] // rows_divisor, CODEC_SHAPE[1])
    words = weights(shape, STATISTICS["usual"], np.random.default_rng(1))
    data = words.reshape(-1).view(np.uint8)
    out = np.empty_like(data)
    found: list[EncodedTensor] = []

    def encode() -> None:
        found[:] = [encode_tensor(data, "BF16", executor)]

    rows = [timed("codec alone", "encode", data.size, rounds, encode)]
    stored = {
        plane.name: np.frombuffer(b"".join(plane.parts), np.uint8) for plane in found[0].planes
    }
    coded = [plane.name for plane in found[0].planes if plane.is_coded]

    def decode() -> None:
        decode_tensor(found[0].codec, stored, coded, out, executor)

    rows.append(timed("codec alone", "decode", data.size, rounds, decode))
    if not np.array_equal(out, data):
        raise AssertionError("the decoded data differs from the encoded data")
    return rows


def read_all(folder: Path, place: torch.Tensor) -> None:
    """Reads like a worker, which copies each tensor to its place; here all share one place."""
    with open_checkpoint(folder) as tensors:
        for name in tensors.names():
            shape = tensors.info(name).shape
            tensors.read_into(name, WHOLE, place[: math.prod(shape)].view(shape))


# ── one checkpoint ───────────────────────────────────────────────────────────────────────────────


def bundle_rows(
    case: str, source: Path, rounds: int, num_threads: int, *, has_speeds: bool
) -> tuple[list[Row], list[Bar], Manifest]:
    num_bytes = folder_bytes(source)
    with tempfile.TemporaryDirectory(prefix="hearth-compression-") as folder:
        bundle, again = Path(folder, "bundle"), Path(folder, "again")
        manifest = compress_folder(source, bundle, Silent(), num_threads=num_threads)
        decompress_folder(bundle, again, Silent(), num_threads=num_threads)
        check_same(source, again)
        rows = size_rows(case, manifest)
        disk_share = folder_bytes(bundle) / num_bytes
        rows[-2]["bundle_share_on_disk"] = round(disk_share, 4)
        bars = size_bars(case, total_row(tensors_of(manifest)), disk_share)
        if has_speeds:
            rows += speed_rows(case, source, Path(folder), rounds, num_threads)
    return rows, bars, manifest


def speed_rows(case: str, source: Path, folder: Path, rounds: int, num_threads: int) -> list[Row]:
    num_bytes, bundle, target = folder_bytes(source), folder / "bundle", folder / "timed"

    def compress() -> None:
        compress_folder(source, target, Silent(), num_threads=num_threads)

    def decompress() -> None:
        decompress_folder(bundle, target, Silent(), num_threads=num_threads)

    def clear() -> None:
        shutil.rmtree(target, ignore_errors=True)

    place = torch.ones(largest_tensor(source), dtype=torch.bfloat16)
    runs: dict[str, Callable[[], object]] = {
        "hearth compress": compress,
        "hearth decompress": decompress,
        "open_checkpoint, bundle": lambda: read_all(bundle, place),
        "open_checkpoint, plain": lambda: read_all(source, place),
    }
    return [timed(case, what, num_bytes, rounds, run, before=clear) for what, run in runs.items()]


def largest_tensor(folder: Path) -> int:
    """Returns the number of weights in the largest tensor."""
    with open_checkpoint(folder) as tensors:
        return max(math.prod(tensors.content(name).shape) for name in tensors.names())


def check_same(folder: Path, other: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and digest_of(path) != digest_of(other / path.relative_to(folder)):
            raise AssertionError(f"{path} differs after a round trip")
