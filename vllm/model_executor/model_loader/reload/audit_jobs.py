# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Audits of many architectures, in processes of their own.

One process audits architecture after architecture, since importing vLLM takes longer
than an audit. One that dies or hangs costs the architecture that it had, and one that
failed audits no other: what the failure left behind, or an import, may be to blame for
the next.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vllm.model_executor.model_loader.reload.audit_run import Row, Verdict, audit
from vllm.model_executor.model_loader.reload.zoo import NoRecipe, tiny
from vllm.model_executor.models import registry
from vllm.utils.system_utils import kill_process_tree

#: Seconds that one architecture may take.
TIMEOUT = 300

#: KV-cache blocks of an engine with a tiny model.
TINY_BLOCKS = 32


@dataclass(frozen=True)
class Job:
    """One architecture, and how to audit it. `options` are the engine's, and
    `checkpoints` two real ones, for which there are tiny ones else.
    """

    architecture: str
    modes: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    checkpoints: tuple[Path, Path] | None = None

    def rows(self, verdict: Verdict, reason: str) -> list[Row]:
        """The same verdict for each mode."""
        tensor_parallel = self.options.get("tensor_parallel_size", 1)
        return [
            Row(self.architecture, mode, tensor_parallel, verdict, reason)
            for mode in self.modes
        ]


def run(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, list[Row]]]:
    """Each job with its rows, as they end. Where this is closed early, no process is
    left.
    """
    waiting = deque(jobs)
    workers = [_Worker() for _ in range(min(processes, len(jobs)))]
    try:
        for worker in workers:
            worker.give(waiting.popleft())
        while busy := [worker for worker in workers if worker.job]:
            wait([sign for worker in busy for sign in worker.signs()], timeout=1)
            for worker in busy:
                job, rows = worker.job, worker.take()
                if job and rows is not None:
                    yield job, rows
                    if waiting:
                        worker.give(waiting.popleft())
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that audits one job at a time, and is started for the first."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self._process: multiprocessing.process.BaseProcess | None = None

    def give(self, job: Job) -> None:
        self.job, self._began = job, time.monotonic()
        if self._process is None:
            self._start()
        self._pipe.send(job)

    def signs(self) -> list[Any]:
        """What says that there may be something to take."""
        return [self._pipe, self._process.sentinel] if self._process else []

    def take(self) -> list[Row] | None:
        """The rows of the job, once it has ended."""
        assert self._process and self.job
        rows = None
        if self._pipe.poll():
            with suppress(EOFError, OSError):
                rows = self._pipe.recv()
        elif self._process.is_alive():
            if time.monotonic() - self._began < TIMEOUT:
                return None
            return self._end(self.job.rows("error", f"no verdict after {TIMEOUT} s"))
        if rows is None:
            return self._end(self.job.rows("error", self._last_words()))
        if not any(row.verdict == "error" for row in rows):
            self._served += 1
            self.job = None
            return rows
        if self._served == 0:
            return self._end(rows)
        job = self.job
        self.stop()
        self.give(job)
        return None

    def stop(self) -> None:
        if self._process and self._process.pid:
            kill_process_tree(self._process.pid)
            self._process.join()
            self._pipe.close()
            self._log.close()
            self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._log = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._process = context.Process(target=_serve, args=(theirs, self._log.name))
        self._process.start()
        theirs.close()
        self._served = 0

    def _end(self, rows: list[Row]) -> list[Row]:
        self.stop()
        self.job = None
        return rows

    def _last_words(self) -> str:
        """How the process ended, and the last line that it wrote."""
        assert self._process
        self._process.join(5)
        code = self._process.exitcode
        how = f"ended with status {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        written = self._log.read().decode(errors="replace").split("\n")
        said = next((line for line in reversed(written) if line.strip()), "")
        return f"its process {how}" + (f": {said.strip()[:200]}" if said else "")


def _serve(pipe: Connection, log: str) -> None:
    """Answer jobs with their rows until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other end says when to stop
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # vLLM looks at each model class in a process of its own, to keep imports out of the
    # engine's; this one is made to be thrown away.
    registry._run_in_subprocess = lambda look: look()
    with suppress(EOFError):
        while True:
            job = pipe.recv()
            pipe.send(list(audited(job)))


def audited(job: Job) -> Iterator[Row]:
    """The rows of `job`, in this process, which keeps an engine of one worker too."""
    if job.options.get("tensor_parallel_size", 1) == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if job.checkpoints:
        yield from audit(job.architecture, *job.checkpoints, job.modes, **job.options)
        return
    try:
        recipe = tiny(job.architecture)
    except NoRecipe as error:
        yield from job.rows("not-auditable", str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        a, b = Path(folder) / "A", Path(folder) / "B"
        recipe.write(a, 1)
        recipe.write(b, 2)
        yield from audit(
            job.architecture,
            a,
            b,
            job.modes,
            backend=recipe.backend,
            num_gpu_blocks_override=TINY_BLOCKS,
            **job.options,
        )
