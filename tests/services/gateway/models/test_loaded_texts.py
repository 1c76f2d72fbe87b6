"""Loading, sharing and leaving of the texts of a catalogue's models, from real files."""

from __future__ import annotations

import asyncio
import gc
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import structlog

from services.gateway.models.encoding_pools import EncodingPools
from services.gateway.models.loaded_texts import (
    MAX_PAUSE_S,
    NUM_THREADS,
    RETRY_S,
    LoadedTexts,
    TextSource,
)
from services.gateway.models.served_text import ServedText, TextLoader
from services.gateway.preparation.preparation_pool import PreparationPool
from services.gateway.structured.grammars.checks import GrammarChecks
from services.gateway.text.model_files import ModelFiles
from services.gateway.text.tokenizer import PromptTokenizer
from shared.errors import NoCapacity
from tests.support.services.model_dir import served_text, without_process, write_model_dir
from tests.support.waiting import LIMIT_S, until


def load_of(pools: EncodingPools) -> tuple[int, int, int]:
    return pools.num_waiting, pools.num_running, pools.num_lost


class Rig:
    """`loads`: the sources that were read. `may_load`: holds the threads that read. `has_check`:
    a process with limits reads a source first.
    """

    def __init__(
        self, max_loaded: int, *, has_check: bool = False, max_wait_s: float = LIMIT_S
    ) -> None:
        self.time = 0.0
        self.loads: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()
        pool = PreparationPool(None)
        loader = TextLoader(pool, GrammarChecks(pool), tool_format="template")
        self._read = loader.load if has_check else lambda path: served_text(ModelFiles(Path(path)))
        self.texts = LoadedTexts(self._load, self, max_loaded=max_loaded, max_wait_s=max_wait_s)

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    def _load(self, source: str) -> ServedText:
        self.loads.append(source)
        assert self.may_load.wait(10)
        return without_process(self._read(source))

    async def get(self, path: Path, digest: str = "d") -> ServedText:
        return await self.texts.get(TextSource(str(path), digest))


@pytest.fixture(scope="module")
def dirs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("texts")
    first = write_model_dir(root / "a")
    return [first, *(Path(shutil.copytree(first, root / name)) for name in "bc")]


async def test_least_recently_used_one_is_loaded_again(dirs: list[Path]) -> None:
    rig = Rig(max_loaded=2)
    a, b, c = dirs
    for path in (a, b, a, c, a):  # b leaves
        await rig.get(path)
    gc.collect()
    assert (rig.loads, len(rig.texts)) == ([str(a), str(b), str(c)], 2)
    await rig.get(b)
    assert rig.loads == [str(a), str(b), str(c), str(b)]


async def test_process_of_a_text_ends_with_it_and_with_no_client(
    dirs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone makes the tokenizer, which takes this one's time."""
    monkeypatch.setattr(PromptTokenizer, "__init__", None)
    pool = PreparationPool(None)
    loader = TextLoader(pool, GrammarChecks(pool), tool_format="template")
    text = loader.load(str(dirs[0]))
    tenant = {"tenant_id": "acme"}
    (token_ids,) = (await text.renderer.encode([["hello world"]], **tenant)).token_ids
    assert text.files.tokens.decode(token_ids) == "hello world"
    leaving = asyncio.create_task(text.renderer.encode([["a" * 200_000]], **tenant))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await text.renderer.encode([["hello world"]], **tenant)).token_ids == [token_ids]
    assert text.renderer._encoding is not None
    for _ in range(2):
        text.renderer._encoding._count_lost()
    assert load_of(loader.encoding) == (0, 0, 2)
    seats, (pid,) = text.renderer._encoding._seats, text.renderer._encoding.process_ids
    del text, leaving
    gc.collect()
    assert seats[0].process is not None and seats[0].process.pid == pid
    assert load_of(loader.encoding) == (0, 0, 2)  # a counter: it remembers those that have left
    async with asyncio.timeout(LIMIT_S):
        assert await seats[0].process.process.wait() == -signal.SIGKILL


def test_waiting_jobs_are_those_of_the_model_with_the_most() -> None:
    """An alert compares them with what one process does soon."""
    encoding = EncodingPools()
    assert encoding.num_waiting == 0
    for num_waiting in (3, 7, 5):
        pool = encoding.open()
        for job in range(num_waiting):
            pool._turns.add("acme", job)
    assert encoding.num_waiting == 7


async def test_text_in_use_is_not_loaded_twice(dirs: list[Path]) -> None:
    rig = Rig(max_loaded=1)
    held = await rig.get(dirs[0])
    for path in dirs[1:]:
        await rig.get(path)
    assert await rig.get(dirs[0]) is held
    assert rig.loads == [str(each) for each in dirs]


@pytest.mark.parametrize("num_others", [0, 4])
async def test_concurrent_requests_share_a_load_that_outlives_its_client(
    dirs: list[Path], num_others: int
) -> None:
    rig = Rig(max_loaded=2)
    rig.may_load.clear()
    first, *others = [asyncio.create_task(rig.get(dirs[0])) for _ in range(1 + num_others)]
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    del first  # its traceback names the load
    rig.may_load.set()
    await until(lambda: not rig.texts._loading, poll_s=0.001)
    gc.collect()
    found = [*await asyncio.gather(*others), await rig.get(dirs[0])]
    assert len(set(map(id, found))) == 1
    assert rig.loads == [str(dirs[0])]


async def test_source_that_hangs_delays_no_other(dirs: list[Path]) -> None:
    rig = Rig(max_loaded=2)
    rig.may_load.clear()
    hangs = asyncio.create_task(rig.get(dirs[0]))
    other = asyncio.create_task(rig.get(dirs[1]))
    async with asyncio.timeout(LIMIT_S):
        while len(rig.loads) < 2:  # both are being read
            await asyncio.sleep(0.001)
    assert not hangs.done()
    rig.may_load.set()
    await asyncio.gather(hangs, other)


async def test_request_leaves_a_load_that_takes_too_long(dirs: list[Path]) -> None:
    """The load goes on for those that come later."""
    rig = Rig(max_loaded=2, max_wait_s=0.01)
    rig.may_load.clear()
    for _ in range(2):
        with pytest.raises(NoCapacity, match="files of this model are still being read"):
            await rig.get(dirs[0])
    rig.may_load.set()
    await until(lambda: not rig.texts._loading, poll_s=0.001)
    rig.texts.max_wait_s = LIMIT_S
    await rig.get(dirs[0])
    assert rig.loads == [str(dirs[0])]


async def test_other_weights_in_the_same_directory_are_read_again(dirs: list[Path]) -> None:
    rig = Rig(max_loaded=4)
    assert await rig.get(dirs[0], "r1") is not await rig.get(dirs[0], "r2")


async def test_failure_is_logged_with_its_source_and_retried_after_a_pause(tmp_path: Path) -> None:
    rig, path = Rig(max_loaded=2, has_check=True), tmp_path / "later"
    with structlog.testing.capture_logs() as lines:
        for left_s in (RETRY_S, 2.0):
            with pytest.raises(NoCapacity, match="cannot be read at the gateway") as raised:
                await rig.get(path)
            assert raised.value.retry_after_s == left_s
            rig.time = RETRY_S - 2.0
    assert [each["source"] for each in lines] == [str(path)]
    assert "is not a directory" in lines[0]["reason"]
    assert len(rig.loads) == 1
    write_model_dir(path)
    rig.time = RETRY_S
    assert (await rig.get(path)).files.model_dir == str(path)


async def test_wait_for_a_thread_lengthens_no_pause(tmp_path: Path) -> None:
    rig = Rig(max_loaded=2)
    rig.may_load.clear()
    gets = [asyncio.create_task(rig.get(tmp_path / f"{each}")) for each in range(NUM_THREADS + 1)]
    await until(lambda: len(rig.loads) >= NUM_THREADS, poll_s=0.001)
    rig.time = 180.0
    rig.may_load.set()
    errors = await asyncio.gather(*gets, return_exceptions=True)
    pauses = [each.retry_after_s for each in errors if isinstance(each, NoCapacity)]
    assert pauses == [MAX_PAUSE_S] * NUM_THREADS + [RETRY_S]


async def test_invalid_files_are_named_on_one_line_to_operators_alone(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path / "broken")
    (path / "tokenizer.json").write_text("{\n}")
    with (
        structlog.testing.capture_logs() as lines,
        pytest.raises(NoCapacity, match="files of this model cannot be read") as raised,
    ):
        await Rig(max_loaded=2, has_check=True).get(path)
    assert str(tmp_path) not in raised.value.message
    assert lines[0]["source"] == str(path)
    assert "tokenizer" in lines[0]["reason"] and "\n" not in lines[0]["reason"]


FIRST_LOAD = """
import gc, sys
import msgspec
import services.gateway.service
from services.gateway.models.loaded_texts import LoadedTexts
from services.gateway.models.served_text import TextLoader
from shared.clock import MonotonicClock

def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))

def examined():
    kinds = subclasses(msgspec.Struct)
    return {each for each in kinds if any(map(is_info, gc.get_referents(each)))}

def is_info(value):
    return type(value).__name__ == "StructInfo"

loader = TextLoader(None, None, tool_format="auto")
LoadedTexts(loader.load, MonotonicClock(), max_loaded=2)
before = examined()
assert before, "msgspec keeps it elsewhere"
loader.load(sys.argv[1])
print([each.__qualname__ for each in examined() - before])
"""


def test_threads_examine_no_types(dirs: list[Path]) -> None:
    """Two that examine one type at the same time end the process: `examine_struct_types`."""
    run = [sys.executable, "-c", FIRST_LOAD, str(dirs[0])]
    found = subprocess.run(run, capture_output=True, text=True, check=False)
    assert (found.stdout, found.returncode) == ("[]\n", 0), found.stderr
