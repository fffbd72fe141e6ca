"""Write the locks: the hash of every function that the edits touch, on every base."""

import argparse

from fork.bases import load_bases
from fork.errors import ForkError
from fork.evaluate import evaluate
from fork.files import wheel_reader
from fork.region import Regions, read_lock, write_lock
from fork.report import say
from fork.series import load_series

HELP = "hash every function that the edits touch, after you have read them on a new base"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def run(args: argparse.Namespace) -> int:
    series = load_series()
    locks: dict[str, dict[str, Regions]] = {patch.name: {} for patch in series}
    for base in load_bases().values():
        if base.tests_only:
            continue
        for result in evaluate(series, base.version, wheel_reader(base.wheel()), locked=False):
            if result.failed:
                raise ForkError(f"{result.patch.name} on {base.name}: {result.outcome}: {result.detail}")
            if result.regions:
                locks[result.patch.name][str(base.version)] = result.regions
    changed = [patch for patch in series if read_lock(patch.folder) != locks[patch.name]]
    for patch in changed:
        write_lock(patch.folder, locks[patch.name])
    names = [patch.name for patch in changed]
    say(f"locks written: {', '.join(names) or 'none changed'}", {"changed": names}, args.json)
    return 0
