"""The worker processes of a host: forked from a template where one is ready, else started plainly.

Each model has a log file. Each worker is killed by the kernel when the host ends. A template that
ends, or does not fork in FORK_S, is replaced MAX_TEMPLATES times; then all workers are started
plainly, which only takes longer. One that does not fork may hang: it stays for its workers, which
would end with it, until the last of them has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import structlog

from services.host.workers.worker_process import WorkerSpec, encode_spec
from services.host.workers.worker_template import TemplateReport
from services.local.processes.child_processes import die_with_parent, ending
from services.local.processes.log_files import bound_logs_while_running, last_line, open_log
from shared.background import Background, is_logged, item_error
from shared.clock import Clock
from shared.config import WorkerConfig
from shared.errors import ConfigError
from shared.lifecycle.child_process import engine_environ, send_signal
from shared.transport.wire_errors import UNREADABLE

log = structlog.get_logger(__name__)

MAX_TEMPLATES = 3
TEMPLATE_WAIT_S = 15.0  # time of the imports; a plain start takes as long
FORK_S = 2.0  # a fork takes milliseconds
UNREPORTED_S = 1.0  # the longest delay of a template's report that a worker ended
TEMPLATE_LOG = "template.log"


class _TemplateEnded(Exception):
    pass


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    worker_id: str
    pid: int
    log_path: Path


# A worker, the return code of its process, and its last line of log.
OnEnd = Callable[[Worker, int, str], None]


class _Template:
    """A running template and the workers that were forked from it, by pid.

    `starting` holds, in order, the requests that it has not forked yet. A future that is done has
    no use for its worker.
    """

    def __init__(self, process: Process) -> None:
        self.process = process
        self.ready = asyncio.Event()  # also set when it has ended
        self.replaced = asyncio.Event()  # it has ended, or does not fork
        self.workers: dict[int, Worker] = {}
        self.starting: deque[tuple[WorkerSpec, asyncio.Future[Worker]]] = deque()


class WorkerProcesses:
    def __init__(
        self,
        directory: Path,
        environ: Mapping[str, str],
        clock: Clock,
        *,
        num_threads: int,
        on_end: OnEnd,
    ) -> None:
        self._logs = directory / "logs"
        self._directory = directory
        self._environ = engine_environ(environ)
        self._clock = clock
        self._num_threads = num_threads
        self._on_end = on_end
        self._running: dict[str, Worker] = {}
        self._template: _Template | None = None  # the template that forks
        self._templates: list[_Template] = []  # all running templates
        self._background = Background()

    async def start(self, *, has_template: bool) -> None:
        """Starts to bound the logs and, with `has_template`, to run a template. Must be called on
        the main thread: the kernel kills children when the calling thread ends.
        """
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        bounding = bound_logs_while_running(self._logs, self._clock, self._logs_in_use)
        self._background.start_own(bounding)
        if has_template:
            self._background.start_own(self._run_templates())

    async def launch(self, config: WorkerConfig, *, log_name: str) -> Worker:
        """Starts a worker. All workers of a model append to the file `log_name`.log.

        Raises ConfigError if the process cannot be started.
        """
        log_path = self._logs / f"{log_name}.log"
        spec = WorkerSpec(config=config, log_path=str(log_path))
        if config.device == "cpu" and self._template is not None:
            with contextlib.suppress(_TemplateEnded, TimeoutError):
                return await self._forked(self._template, spec)
        return await self._started(spec)

    def has(self, worker_id: str) -> bool:
        return worker_id in self._running

    def signal(self, worker_id: str, number: signal.Signals) -> None:
        worker = self._running.get(worker_id)
        if worker is not None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(worker.pid, number)

    async def stop(self) -> None:
        """Kills the remaining workers and the templates."""
        for worker_id in list(self._running):
            self.signal(worker_id, signal.SIGKILL)
        for template in self._templates:
            send_signal(template.process, signal.SIGKILL)
        await self._background.stop()  # includes the tasks that wait for the workers' ends
        for template in self._templates:
            await template.process.wait()

    def _logs_in_use(self) -> set[Path]:
        return {self._logs / TEMPLATE_LOG, *(each.log_path for each in self._running.values())}

    # ── plain processes ──────────────────────────────────────────────────────────────────────────

    async def _started(self, spec: WorkerSpec) -> Worker:
        process = await self._exec(
            "services.host.workers.worker_process", log_path=Path(spec.log_path)
        )
        assert process.stdin is not None
        process.stdin.write(encode_spec(spec))
        process.stdin.close()
        worker = self._registered(spec, process.pid)
        self._background.start_item(self._wait(worker, process), is_logged)
        return worker

    def _registered(self, spec: WorkerSpec, pid: int) -> Worker:
        worker_id = spec.config.process_id
        worker = Worker(worker_id=worker_id, pid=pid, log_path=Path(spec.log_path))
        self._running[worker_id] = worker
        return worker

    async def _wait(self, worker: Worker, process: Process) -> None:
        self._ended(worker, await process.wait())

    async def _exec(
        self, module: str, *arguments: str, log_path: Path, stdout: int | None = None
    ) -> Process:
        """Starts a module. Its output goes to `stdout`, or if that is None to the log, too."""
        log_file = open_log(log_path)
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                env=self._environ,
                cwd=self._directory,
                stdin=PIPE,
                stdout=log_file if stdout is None else stdout,
                stderr=log_file,
                start_new_session=True,
                preexec_fn=die_with_parent(os.getpid()),
            )
        except OSError as error:
            raise ConfigError(f"cannot start {module}: {error.strerror}") from None
        finally:
            os.close(log_file)

    def _ended(self, worker: Worker, status: int) -> None:
        if self._running.get(worker.worker_id) is worker:
            del self._running[worker.worker_id]
            line = last_line(worker.log_path).removeprefix(f"{worker.worker_id}: ")
            self._on_end(worker, status, f"{ending(status)}: {line}" if line else ending(status))

    # ── the template ─────────────────────────────────────────────────────────────────────────────

    async def _run_templates(self) -> None:
        for _ in range(MAX_TEMPLATES):
            try:
                process = await self._exec(
                    "services.host.workers.worker_template",
                    str(self._num_threads),
                    log_path=self._logs / TEMPLATE_LOG,
                    stdout=PIPE,
                )
            except ConfigError as error:
                log.warning("template_not_started", reason=error.message)
                continue
            template = self._template = _Template(process)
            self._templates.append(template)
            self._background.start_item(self._follow(template), is_logged)
            await template.replaced.wait()
            self._template = None

    async def _follow(self, template: _Template) -> None:
        try:
            await self._read(template)
        except BaseException as raised:
            item_error(raised)
            log.exception("template_not_read")
            self._replace(template)
        finally:
            self._template_ended(template, await template.process.wait())

    def _template_ended(self, template: _Template, status: int) -> None:
        last = last_line(self._logs / TEMPLATE_LOG)
        log.warning("template_ended", status=ending(status), last=last)
        self._templates.remove(template)
        template.replaced.set()
        template.ready.set()
        for _, future in template.starting:
            if not future.done():
                future.set_exception(_TemplateEnded)
        for pid in list(template.workers):  # the kernel has killed them with it
            self._forked_ended(template, pid, -signal.SIGKILL)

    async def _read(self, template: _Template) -> None:
        assert template.process.stdout is not None
        while line := await template.process.stdout.readline():
            try:
                report = msgspec.json.decode(line, type=TemplateReport)
            except UNREADABLE:
                log.warning("template_report_invalid", line=line[:200])
                continue
            if report.failure:
                self._has_not_forked(template, report.failure)
            elif report.pid == 0:
                template.ready.set()
            elif report.status is None:
                self._has_forked(template, report.pid)
            else:
                self._forked_ended(template, report.pid, report.status)

    def _has_forked(self, template: _Template, pid: int) -> None:
        spec, future = template.starting.popleft()
        if future.done():  # it was started plainly meanwhile
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        worker = template.workers[pid] = self._registered(spec, pid)
        self._watch_end(template, pid)
        future.set_result(worker)

    def _has_not_forked(self, template: _Template, failure: str) -> None:
        _, future = template.starting.popleft()
        if not future.done():
            future.set_exception(ConfigError(f"cannot fork a worker: {failure}"))

    def _forked_ended(self, template: _Template, pid: int, status: int) -> None:
        worker = template.workers.pop(pid, None)
        if worker is not None:
            self._ended(worker, status)
        self._end_if_unused(template)

    def _end_if_unused(self, template: _Template) -> None:
        """Kills a template that no longer forks, once its workers have ended: they would end with
        it.
        """
        if not template.workers and template is not self._template:
            send_signal(template.process, signal.SIGKILL)

    def _watch_end(self, template: _Template, pid: int) -> None:
        """Watches the end of a template's worker, as a template that hangs does not report it."""
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(pid)
        except (AttributeError, OSError):  # no Linux, or the process has ended, which is reported
            return

        def has_ended() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            loop.call_later(UNREPORTED_S, self._forked_ended, template, pid, 1)

        loop.add_reader(fd, has_ended)

    async def _forked(self, template: _Template, spec: WorkerSpec) -> Worker:
        """Forks a worker from the template. Raises _TemplateEnded if the template ends meanwhile,
        TimeoutError if it is not ready, or does not reply, ConfigError if it cannot fork.
        """
        async with asyncio.timeout(TEMPLATE_WAIT_S):
            await template.ready.wait()
        if template is not self._template:
            raise _TemplateEnded
        assert template.process.stdin is not None
        future: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        template.starting.append((spec, future))
        template.process.stdin.write(encode_spec(spec))
        try:
            async with asyncio.timeout(FORK_S):
                return await future
        except TimeoutError:
            log.warning("template_does_not_fork", pid=template.process.pid)
            self._replace(template)
            raise

    def _replace(self, template: _Template) -> None:
        if self._template is template:  # another launch may have replaced it
            self._template = None
        template.replaced.set()
        self._end_if_unused(template)
