"""Weights that the processes of a host share: equal bits, one copy, and no use of bad files."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs

from kernels.cache import cache_root
from kernels.cpu.gemm.linear import library_packs
from shared.engine.executors.load import load_executor
from shared.engine.executors.local_executor import LocalExecutor
from shared.engine.weights.load import open_checkpoint
from shared.engine.weights.shared_weights import map_weights, weights_cache_dir
from shared.engine.weights.weight_bytes import can_share_packed
from tests.support.engine.checkpoints import write_llama
from tests.support.engine.steps import Blocks, prefill

ROOT = Path(__file__).parents[4]
PROMPT = list(range(5, 60))
FIELDS = ("Rss", "Pss", "Private_Dirty", "Private_Clean")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty weights cache; the compiled kernels are those of the test run."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(cache_root() / "kernels")
    monkeypatch.setenv("HEARTH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model", attention_bias=True)
    return tmp_path / "model"


def load(checkpoint: Path, dtype: str = "float32") -> LocalExecutor:
    return load_executor(checkpoint, dtype=dtype, kv_cache_bytes=1 << 20)


def logits(executor: LocalExecutor) -> torch.Tensor:
    return prefill(executor, Blocks(executor.num_blocks).line(PROMPT), 64)


def private(checkpoint: Path, dtype: str = "float32") -> LocalExecutor:
    """Loads with a cache path that cannot exist, so the weights are private."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTH_CACHE_DIR", str(checkpoint / "config.json" / "cache"))
        return load(checkpoint, dtype)


def packed_file(cache: Path) -> Path:
    (found,) = cache.glob("*.packed")
    return found


def test_cache_dir_follows_the_environment() -> None:
    assert weights_cache_dir({"HEARTH_CACHE_DIR": "/c", "HOME": "/h"}) == Path("/c/weights")
    assert weights_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/hearth/weights")
    assert weights_cache_dir({"HOME": "/h"}) == Path("/h/.cache/hearth/weights")


def test_installed_torch_can_share_packed_weights() -> None:
    assert can_share_packed()


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", pytest.param("float16", marks=pytest.mark.long)]
)
def test_logits_equal_those_of_private_weights(
    cache: Path, tmp_path: Path, dtype: str, is_tied: bool
) -> None:
    checkpoint = tmp_path / "model"
    write_llama(checkpoint, tie_word_embeddings=is_tied, attention_bias=True)
    expected = private(checkpoint, dtype)
    first, second = load(checkpoint, dtype), load(checkpoint, dtype)
    assert packed_file(cache)
    for executor in (first, second):
        assert torch.equal(logits(executor), logits(expected))
        assert executor.revision == expected.revision


def test_two_processes_share_one_copy(cache: Path, checkpoint: Path) -> None:
    code = (
        "import sys; from shared.engine.executors.load import load_executor\n"
        f"executor = load_executor({str(checkpoint)!r}, dtype='bfloat16', kv_cache_bytes=9**6)\n"
        "print('loaded', flush=True); sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    try:
        assert child.stdout is not None
        assert any(line == "loaded\n" for line in child.stdout)
        executor = load(checkpoint, "bfloat16")
        logits(executor)  # touches all pages
        path = packed_file(cache)
        for pid in (child.pid, os.getpid()):
            permissions, memory = mapping_of(path, pid)
            assert permissions == "r--s"
            assert memory["Private_Dirty"] == memory["Private_Clean"] == 0
            assert memory["Rss"] * 1024 >= path.stat().st_size
            assert memory["Pss"] <= memory["Rss"] / 2 + 4
    finally:
        child.kill()
        child.communicate()


def mapping_of(path: Path, pid: int) -> tuple[str, dict[str, int]]:
    """Permissions of the packed file's mapping in a process, and its memory fields in KiB."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    (block,) = (
        each for each in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text) if f"{path}\n" in each
    )
    values = dict(re.findall(r"^(\w+): +(\d+) kB", block, re.MULTILINE))
    return block.split()[1], {name: int(values[name]) for name in FIELDS}


def test_every_parameter_is_aligned_and_in_the_file(cache: Path, checkpoint: Path) -> None:
    model = load(checkpoint, "bfloat16").computer.model
    first, last = address_range(packed_file(cache))
    parameters = list(model.parameters())
    assert len(parameters) > 4
    packed = [module.weight for module in model.modules() if hasattr(module, "pack")]
    assert sum(each.is_mkldnn for each in packed) > 2 or not library_packs(torch.bfloat16)
    addresses = [each.data_ptr() for each in parameters]
    for each in packed:  # a weight that sums in lanes stays dense
        addresses.append(torch.ops.mkldnn.data_ptr(each) if each.is_mkldnn else each.data_ptr())
    for address in addresses:
        assert first <= address < last
        assert address % 64 == 0


def address_range(path: Path) -> tuple[int, int]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(path)):
            first, last = line.split(" ")[0].split("-")
            return int(first, 16), int(last, 16)
    raise LookupError(path)


def test_second_start_reads_no_weights(cache: Path, checkpoint: Path) -> None:
    expected = logits(load(checkpoint))
    path = checkpoint / "model.safetensors"
    stat = path.stat()
    with path.open("r+b") as file:  # the same size and times, which are all that a start checks
        file.seek(-1000, os.SEEK_END)
        file.write(bytes(1000))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(logits(load(checkpoint)), expected)


def test_changed_checkpoint_replaces_the_packed_file(cache: Path, checkpoint: Path) -> None:
    first = load(checkpoint)
    old = packed_file(cache)
    write_llama(checkpoint, seed=1, attention_bias=True)
    second = load(checkpoint)
    assert packed_file(cache) != old
    assert second.revision != first.revision == private_revision(checkpoint, seed=0)
    assert torch.equal(logits(second), logits(private(checkpoint)))


def private_revision(checkpoint: Path, seed: int) -> str:
    other = checkpoint.with_name(f"seed-{seed}")
    write_llama(other, seed=seed, attention_bias=True)
    return private(other).revision


def test_files_of_other_models_and_dtypes_remain(
    cache: Path, checkpoint: Path, tmp_path: Path
) -> None:
    write_llama(tmp_path / "other", seed=1)
    for each in (checkpoint, tmp_path / "other"):
        for dtype in ("float32", "bfloat16"):
            load(each, dtype)
    assert len(list(cache.glob("*.packed"))) == 4
    assert {each.name for each in cache.iterdir() if each.suffix != ".packed"} == {"lock"}


def flip(position: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)

    return change


def cut(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, path.stat().st_size - num_bytes)


def write_with_old_times(path: Path, content: bytes) -> None:
    """Writes the content and restores the file's times."""
    stat = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "payload": flip(5000),
    "header": flip(-200),
    "digest": flip(-30),
    "magic": flip(-1),
    "one byte short": cut(1),
    "without trailer": cut(32),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "first part missing": lambda path: write_with_old_times(path, path.read_bytes()[64:]),
    "empty": lambda path: os.truncate(path, 0),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "other content": lambda path: path.write_bytes(b"something else" * 1000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_built_again(cache: Path, checkpoint: Path, damage: str) -> None:
    expected = logits(load(checkpoint))
    path = packed_file(cache)
    original = path.read_bytes()
    DAMAGES[damage](path)
    assert torch.equal(logits(load(checkpoint)), expected)
    assert path.read_bytes() == original


def test_intact_file_with_a_new_time_is_sealed_again(cache: Path, checkpoint: Path) -> None:
    load(checkpoint)
    path = packed_file(cache)
    before = path.stat()
    os.utime(path)
    assert path.stat().st_mtime_ns != before.st_mtime_ns
    load(checkpoint)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_unusable_cache_logs_one_warning(checkpoint: Path) -> None:
    with capture_logs() as logs:
        private(checkpoint)
    assert [entry["event"] for entry in logs] == ["shared_weights_unavailable"]
    assert "Not a directory" in logs[0]["reason"]


def test_full_disk_leaves_no_partial_file(cache: Path, checkpoint: Path) -> None:
    expected = private(checkpoint)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with capture_logs() as logs:
            executor = load(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [entry["event"] for entry in logs] == ["shared_weights_unavailable"]
    assert [each.name for each in cache.iterdir()] == ["lock"]
    assert torch.equal(logits(executor), logits(expected))


def test_one_of_several_concurrent_starts_builds(cache: Path, checkpoint: Path) -> None:
    with capture_logs() as logs, ThreadPoolExecutor(4) as pool:
        executors = list(pool.map(load, [checkpoint] * 4))
    assert [entry["event"] for entry in logs] == ["weights_packed"]
    assert len({executor.revision for executor in executors}) == 1
    for executor in executors[1:]:
        assert torch.equal(logits(executor), logits(executors[0]))


def test_partial_file_of_a_dead_builder_is_removed(cache: Path, checkpoint: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "0123.partial").write_bytes(b"half of it")
    load(checkpoint)
    assert sorted(each.suffix for each in cache.iterdir()) == ["", ".packed"]


class Padded(torch.nn.Module):
    """A module with a parameter of four rows; the checkpoint sets the first three."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((4, 2), 7.0), requires_grad=False)


def test_rows_that_no_checkpoint_sets_are_unchanged(tmp_path: Path) -> None:
    rows = torch.arange(6.0).view(3, 2)
    save_file({"rows": rows}, tmp_path / "model.safetensors")
    for _ in range(2):
        model = Padded()
        with open_checkpoint(tmp_path) as tensors:
            destinations, cache = {"rows": model.weight[:3]}, tmp_path / "cache"
            map_weights(model, destinations, tensors, b"", lambda: "revision", cache)
        assert torch.equal(model.weight, torch.cat([rows, torch.full((1, 2), 7.0)]))
