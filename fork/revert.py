"""Take the series back out of a tree, a half-patched one too."""

import argparse

from fork import files, journal
from fork.apply import add_arguments, target
from fork.errors import ForkError
from fork.report import say

HELP = "give a patched or half-patched tree the bytes of its base again"

__all__ = ["HELP", "add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    base, wheel, tree = target(args)
    if not tree.is_dir():
        raise ForkError(f"{tree} is not there; name a patched vLLM tree with --tree")
    restored = journal.restore_tree(tree, base, files.wheel_reader(wheel))
    payload = {"base": base.name, "tree": str(tree), "tree_hash": files.tree_hash(tree), "files": restored}
    say(f"restored {len(restored)} files of {tree}" if restored else f"{tree} has no patches", payload, args.json)
    return 0
