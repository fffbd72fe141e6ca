"""What every patch does on every base."""

import argparse

from fork.bases import find_base, load_bases
from fork.evaluate import evaluate
from fork.files import wheel_reader
from fork.report import Table, show
from fork.series import load_series

HELP = "the outcome of every patch on every base; exit 1 where one fails"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="this base only")


def run(args: argparse.Namespace) -> int:
    series = load_series()
    bases = [find_base(args.base)] if args.base else list(load_bases().values())
    results = {base.name: evaluate(series, base.version, wheel_reader(base.wheel())) for base in bases}
    failed = [(name, result) for name in results for result in results[name] if result.failed]
    if args.json:
        rows = [
            {"patch": r.patch.name, "base": name, "outcome": r.outcome, "detail": r.detail, "failed": r.failed}
            for name in results
            for r in results[name]
        ]
        show(Table("series", rows, ()), as_json=True)
        return int(bool(failed))
    grid = [
        {"patch": patch.name} | {name: results[name][row].outcome for name in results}
        for row, patch in enumerate(series)
    ]
    show(Table("series", grid, ("patch", *results)), as_json=False)
    for name, result in failed:
        print(f"{result.patch.name} on {name}: {result.outcome}: {result.detail}")
    return int(bool(failed))
