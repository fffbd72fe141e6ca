"""Check what the repository promises about the series: headers, rules, owned files, locks and originality."""

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fork import ROOT, docs
from fork.bases import find_base, load_bases
from fork.errors import ForkError
from fork.evaluate import evaluate
from fork.files import wheel_reader
from fork.originality import project_files, runs, upstream_files
from fork.region import read_lock
from fork.report import Row, Table, show
from fork.series import Patch, load_series

HELP = "check headers, rules, owned files, locks, made pages and originality; exit 1 where one fails"

#: A fix with more new lines than this belongs in an overlay file.
LONGEST_FIX = 15

#: Folders below tests/ that no patch ships.
_OWN_TESTS = ("tests/fork/", "tests/gpu/")

#: What the tool reads in the folder of a patch.
_READ = re.compile(r"patch\.toml|PR\.md|lock\.json|(edits|upstream|regress)/[^/]+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="look at this base only, and at no made page")


def findings(base: str | None = None, root: Path = ROOT) -> Iterator[Row]:
    """Every promise that is broken, as `check`, `where` and `detail`. A series that cannot be read is one finding.

    Raises ForkError where the check itself cannot be made: a wheel that cannot be had or verified, no git checkout.
    """
    chosen = [find_base(base)] if base else list(load_bases().values())
    bases = [(each, wheel_reader(each.wheel())) for each in chosen]
    ours = project_files(root)
    try:
        series = load_series(root)
        for patch in series:
            yield from _files(patch, root, ours)
            yield from _rules(patch)
        yield from _owners(series, ours)
        evaluated = [(each, evaluate(series, each.version, read, root)) for each, read in bases]
        yield from _locks(series, evaluated, stale=base is None)
        if base is None:
            yield from docs.findings(root, evaluated)
    except ForkError as error:
        yield _finding("series", "patches", str(error))
    for run in runs(ours, upstream_files(chosen)):
        yield _finding(
            "originality", f"{run.path}:{run.first}-{run.last}", f"repeats {run.upstream}: write it your own way"
        )


def _finding(check: str, where: str, detail: str) -> Row:
    return {"check": check, "where": where, "detail": detail}


def _files(patch: Patch, root: Path, ours: Iterable[str]) -> Iterator[Row]:
    here = f"patches/{patch.name}"
    for path in (*patch.adds, *patch.tests):
        if not (root / path).is_file():
            yield _finding("files", here, f"names {path}, which is not there")
    if not patch.tests:
        yield _finding("files", here, "names no test that goes red without it")
    for path in ours:
        if path.startswith(f"{here}/") and not _READ.fullmatch(path.removeprefix(f"{here}/")):
            yield _finding("files", path, "is read by nothing; rules stand in edits/, upstream/ and regress/")


def _rules(patch: Patch) -> Iterator[Row]:
    if not patch.edits and not patch.adds:
        yield _finding("rules", f"patches/{patch.name}", "has neither edits nor files to add")
    for rule in (*patch.edits, *patch.regress):
        if not rule.rewrites:
            yield _finding("rules", rule.name, "has no fix; an edit says what stands there afterwards")
        elif rule.new_lines > LONGEST_FIX:
            yield _finding(
                "rules", rule.name, f"writes {rule.new_lines} lines; more than {LONGEST_FIX} go to an overlay file"
            )
    for rule in patch.proofs:
        if rule.rewrites:
            yield _finding("rules", rule.name, "has a fix; a proof only matches")


def _owners(series: list[Patch], ours: Iterable[str]) -> Iterator[Row]:
    owners: dict[str, str] = {}
    for patch in series:
        for path in patch.adds:
            if path in owners:
                yield _finding("owners", path, f"is owned by both {owners[path]} and {patch.name}")
            owners[path] = patch.name
    for path in ours:
        if path.startswith(("tests/", "vllm/")) and path not in owners and not path.startswith(_OWN_TESTS):
            yield _finding("owners", path, "is owned by no patch; name it in the `adds` of one")


def _locks(series: list[Patch], evaluated: docs.Evaluated, stale: bool) -> Iterator[Row]:
    versions: dict[str, set[str]] = {patch.name: set() for patch in series}
    for base, results in evaluated:
        for result in results:
            where = f"patches/{result.patch.name}"
            if result.failed:
                yield _finding("outcome", where, f"on {base.name}: {result.outcome}: {result.detail}")
            elif result.regions:
                versions[result.patch.name].add(str(base.version))
    for patch in series if stale else ():
        for version in sorted(set(read_lock(patch.folder)) - versions[patch.name]):
            yield _finding(
                "lock", f"patches/{patch.name}", f"holds {version}, where it touches nothing; `python -m fork lock`"
            )


def run(args: argparse.Namespace) -> int:
    rows = list(findings(args.base))
    if rows or args.json:
        show(Table("lint", rows, ("check", "where", "detail")), args.json)
    else:
        print("lint: every check holds")
    return int(bool(rows))
