"""Run the tests that each patch names, with it and without it, on every base that runs on a CPU."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fork import ROOT, files
from fork.bases import Base, find_base, load_bases
from fork.errors import ForkError
from fork.evaluate import ALREADY_UPSTREAM, APPLIED, Reader, Result, changes, evaluate, regress
from fork.report import Table, show
from fork.series import Patch, find_patch, load_series, without

HELP = "run the tests of each patch on each base; with --drop, without the patch, where each must fail"


#: Seconds that one test file may take: the slowest take a few minutes on two cores, a step of CI has 90.
LIMIT = 20 * 60

#: How many test files run at once, each on its share of the cores: most of the time one core reads Python modules.
JOBS = 2

#: What pytest ends with where it came to its own end: all passed, some failed, stopped early, no test found.
_PYTEST_ENDED = (0, 1, 2, 5)


#: A test file to run: the base, the patch it is for, the files that differ from the base meanwhile, its path.
Try = tuple[Base, Patch, dict[str, bytes], str]


@dataclass(frozen=True)
class Counts:
    """What pytest counted in one run, and the end of what it said.

    `broken` says why the run proves nothing, with a patch or without: it took too long or has no report.
    """

    passed: int
    failed: int
    skipped: int
    said: str
    broken: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", nargs="*", help="these patches only")
    parser.add_argument("--base", metavar="NAME", action="append", help="on this base only (repeatable)")
    parser.add_argument("--drop", action="store_true", help="without the patch: each of its test files must go red")


def run(args: argparse.Namespace) -> int:
    series = load_series()
    chosen = [find_patch(series, name) for name in args.patch] or series
    bases = [find_base(name) for name in args.base] if args.base else list(load_bases().values())
    tries = [(base, *one) for base in bases if base.runs_on_cpu for one in _tries(chosen, series, base, args.drop)]
    tried = {patch.name for _, patch, _, _ in tries}
    untried = [patch.name for patch in chosen if patch.name not in tried]
    # That a patch of the whole series is not for the one base asked for is no fault.
    if untried and (args.patch or not args.base or not tries):
        names = ", ".join(base.name for base in bases)
        raise ForkError(f"no test of {', '.join(untried)} can be tried on {names}; name another with --base")
    rows = []
    for (base, patch, _, test), counts in zip(tries, _side_by_side(tries), strict=True):
        good = counts.failed > 0 if args.drop else counts.failed == 0 and counts.passed > 0
        verdict = counts.broken or ("as it must" if good else "WRONG")
        rows.append(
            {"patch": patch.name, "base": base.name, "dropped": args.drop, "test": test}
            | {"passed": counts.passed, "failed": counts.failed, "skipped": counts.skipped, "verdict": verdict}
        )
        if verdict != "as it must":
            print(counts.said, file=sys.stderr)
        if not args.json:
            print(f"{base.name}: {test}: {counts.passed} passed, {counts.failed} failed: {verdict}", flush=True)
    show(Table("trial", rows, ("patch", "base", "test", "passed", "failed", "skipped", "verdict")), args.json)
    return int(any(row["verdict"] != "as it must" for row in rows))


def _tries(
    chosen: list[Patch], series: list[Patch], base: Base, drop: bool
) -> Iterator[tuple[Patch, dict[str, bytes], str]]:
    """Each test of the `chosen` patches to run on `base`, with the files that differ from the base meanwhile."""
    read = files.wheel_reader(base.wheel())
    results = evaluate(series, base.version, read)
    for patch in chosen:
        changed = changed_files(patch, series, base, results, read, drop)
        if changed is not None:
            yield from ((patch, changed, test) for test in patch.tests)


def changed_files(
    patch: Patch, series: list[Patch], base: Base, results: list[Result], read: Reader, drop: bool
) -> dict[str, bytes] | None:
    """The files that differ from the base in the tree to try, or None where there is nothing to try.

    Dropping a patch that the base has already means putting the fault back with its regress rules. Raises ForkError
    where a patch of the series fails.
    """
    final = changes(results)
    outcome = next(result.outcome for result in results if result.patch is patch)
    if outcome == APPLIED:
        return changes(evaluate(without(series, {patch.name}), base.version, read)) if drop else final
    if outcome == ALREADY_UPSTREAM and any(rule.is_for(base.version) for rule in patch.regress):
        put_back = regress(patch, base.version, lambda path: final[path] if path in final else read(path))
        return final | put_back if drop else final
    return None


def _side_by_side(tries: list[Try]) -> Iterator[Counts]:
    """What pytest counts for each of `tries`, in order. `JOBS` run at once; where this ends early, they are ended."""
    left = list(enumerate(tries))[::-1]
    running: dict[int, tuple[_Run, ExitStack]] = {}
    done: dict[int, Counts] = {}
    try:
        for wanted in range(len(tries)):
            while wanted not in done:
                while left and len(running) < JOBS:
                    position, (base, _, changed, test) = left.pop()
                    stack = ExitStack()
                    running[position] = stack.enter_context(_started(base, changed, test)), stack
                time.sleep(0.1)
                for position in [position for position, (run, _) in running.items() if run.over()]:
                    run, stack = running.pop(position)
                    with stack:
                        done[position] = run.counts()
            yield done.pop(wanted)
    finally:
        for _, stack in running.values():
            stack.close()


@dataclass(frozen=True)
class _Run:
    """One test file that pytest runs on a tree of its own, in a process group of its own."""

    name: str
    process: subprocess.Popen[bytes]
    report: Path
    said: Path
    deadline: float

    def over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() > self.deadline

    def counts(self) -> Counts:
        """What pytest counted; a file that does not load counts as failed."""
        status, said = self.process.poll(), self.said.read_text(errors="replace")[-6000:]
        if status is None:
            return Counts(0, 1, 0, f"{said}\n{self.name} was ended after {LIMIT} seconds", "TIMED OUT")
        if status not in _PYTEST_ENDED or not self.report.exists():
            return Counts(0, 1, 0, f"{said}\n{self.name} ended with status {status}", "BROKE OFF")
        suite = next(ElementTree.parse(self.report).getroot().iter("testsuite"))
        count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"] or int(status == 2)
        return Counts(max(0, count["tests"] - failed - count["skipped"]), failed, count["skipped"], said)


@contextmanager
def _started(base: Base, changed: dict[str, bytes], test: str) -> Iterator[_Run]:
    """Run one test file of the repository on `base` with `changed` in it; all it started is ended with the block."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, report, said = (Path(scratch, name) for name in ("tree", "report.xml", "said.txt"))
        files.link_tree(files.stock_tree(base), tree, changed)
        threads = str(max(1, (os.cpu_count() or 1) // JOBS))
        env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        env |= {"OMP_NUM_THREADS": threads, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        with said.open("wb") as stream:
            process = subprocess.Popen(
                [*command, f"--junitxml={report}", str(ROOT / test)], cwd=scratch, env=env, stdin=subprocess.DEVNULL,
                stdout=stream, stderr=stream, start_new_session=True,
            )  # fmt: skip
        try:
            yield _Run(f"{test} on {base.name}", process, report, said, time.monotonic() + LIMIT)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
