"""Run the tests that each patch names, with it and without it, on every base that runs on a CPU."""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from fork import ROOT, files
from fork.bases import Base, find_base, load_bases
from fork.evaluate import ALREADY_UPSTREAM, APPLIED, Result, changes, evaluate, regress
from fork.report import Table, show
from fork.series import Patch, find_patch, load_series, without

HELP = "run the tests of each patch on each base; with --drop, without the patch, where each must fail"


@dataclass(frozen=True)
class Counts:
    """What pytest counted in one run, and the end of what it said."""

    passed: int
    failed: int
    skipped: int
    said: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patch", nargs="*", help="these patches only")
    parser.add_argument("--base", metavar="NAME", action="append", help="on this base only (repeatable)")
    parser.add_argument("--drop", action="store_true", help="without the patch: each of its test files must go red")


def run(args: argparse.Namespace) -> int:
    series = load_series()
    chosen = [find_patch(series, name) for name in args.patch] or series
    bases = [find_base(name) for name in args.base] if args.base else list(load_bases().values())
    rows = []
    for base in bases:
        if not base.runs_on_cpu:
            continue
        read = files.wheel_reader(base.wheel())
        results = {result.patch.name: result for result in evaluate(series, base.version, read)}
        for patch in chosen:
            tree = _changed(patch, series, base, results, args.drop)
            if tree is None:
                continue
            for test in patch.tests:
                counts = _pytest(base, tree, test)
                good = counts.failed > 0 if args.drop else counts.failed == 0 and counts.passed > 0
                rows.append(
                    {"patch": patch.name, "base": base.name, "dropped": args.drop, "test": test}
                    | {"passed": counts.passed, "failed": counts.failed, "skipped": counts.skipped}
                    | {"verdict": "as it must" if good else "WRONG"}
                )
                if not good:
                    print(counts.said, file=sys.stderr)
                if not args.json:
                    print(f"{base.name}: {test}: {counts.passed} passed, {counts.failed} failed", flush=True)
    show(Table("trial", rows, ("patch", "base", "test", "passed", "failed", "skipped", "verdict")), args.json)
    return int(not rows or any(row["verdict"] == "WRONG" for row in rows))


def _changed(
    patch: Patch, series: list[Patch], base: Base, results: dict[str, Result], drop: bool
) -> dict[str, bytes] | None:
    """The files that differ from the base in the tree to try, or None where there is nothing to try.

    Dropping a patch that the base has already means putting the fault back with its regress rules.
    """
    read = files.wheel_reader(base.wheel())
    outcome = results[patch.name].outcome
    if outcome == APPLIED:
        kept = without(series, {patch.name}) if drop else series
        return changes(evaluate(kept, base.version, read))
    if outcome == ALREADY_UPSTREAM and any(rule.is_for(base.version) for rule in patch.regress):
        final = changes(list(results.values()))
        return final | regress(patch, base.version, lambda path: final.get(path) or read(path)) if drop else final
    return None


def _pytest(base: Base, changed: dict[str, bytes], test: str) -> Counts:
    """Run one test file of the repository on `base` with `changed` in it; one that does not load counts as failed."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, report = Path(scratch, "tree"), Path(scratch, "report.xml")
        files.link_tree(files.stock_tree(base), tree, changed)
        env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
        done = subprocess.run(
            [*command, f"--junitxml={report}", str(ROOT / test)], cwd=scratch, env=env, capture_output=True, text=True
        )
        said = (done.stdout + done.stderr)[-6000:]
        if not report.exists():
            return Counts(0, 1, 0, said)
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
        count = {key: int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")}
        failed = count["failures"] + count["errors"]
        return Counts(count["tests"] - failed - count["skipped"], failed, count["skipped"], said)
