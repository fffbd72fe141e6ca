"""Apply the series to a tree on disk; what fails is taken back."""

import argparse
from contextlib import suppress
from pathlib import Path

from fork import ROOT, files, journal
from fork.bases import Base, Wheel, find_base
from fork.errors import ForkError
from fork.evaluate import APPLIED, changes, evaluate
from fork.report import say
from fork.series import load_series

HELP = "apply the series to a tree in place"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="the base the tree is of")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="which wheel of the base; cpu where it has one")
    parser.add_argument(
        "--tree",
        metavar="DIR",
        type=Path,
        help="the folder that holds vllm/; without it build/trees/BASE-DEVICE, laid out first",
    )


def target(args: argparse.Namespace) -> tuple[Base, Wheel, Path]:
    """The base, its wheel, and the tree that `--base`, `--device` and `--tree` name."""
    base = find_base(args.base)
    wheel = base.wheel(args.device)
    return base, wheel, args.tree or ROOT / "build" / "trees" / f"{base.name}-{wheel.device}"


def run(args: argparse.Namespace) -> int:
    base, wheel, tree = target(args)
    pristine = files.wheel_reader(wheel)
    results = evaluate(load_series(), base.version, pristine)
    final = changes(results)
    if not tree.exists():
        if args.tree:
            raise ForkError(f"{tree} is not there; name a vLLM tree with --tree, or leave it out to lay one out")
        with suppress(files.OvertakenError), files.laid_out(tree) as scratch:
            files.lay_out(base, wheel, scratch, native=False)
    applied = [result.patch.name for result in results if result.outcome == APPLIED]
    changed = journal.patch_tree(tree, base, pristine, final)
    payload = {
        "base": base.name,
        "tree": str(tree),
        "changed": changed,
        "tree_hash": files.tree_hash(tree),
        "patches": [{"patch": r.patch.name, "base": base.name, "outcome": r.outcome} for r in results],
        "files": sorted(final),
    }
    did = (
        f"applied {len(applied)} patches to {tree}: {len(final)} files" if changed else f"{tree} has the series already"
    )
    say(did, payload, args.json)
    return 0
