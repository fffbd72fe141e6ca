"""Lay out the fork of one base as a git repository: the base first, then one commit for each patch."""

import argparse
from pathlib import Path

from fork import files, git
from fork.bases import Base, Wheel, find_base
from fork.evaluate import Result, changes, evaluate
from fork.journal import JOURNAL
from fork.report import say
from fork.series import find_patch, load_series, without

HELP = "lay out the complete tree of a base as a git repository, one commit a patch"

#: What Python finds beside the sources; not part of what a reader browses or a pull request changes.
_UNTRACKED = ("*.so", "/vllm/vllm-rs", "/*.dist-info/", "__pycache__/", f"/{JOURNAL}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="the base to lay out")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="which wheel of the base; cpu where it has one")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--drop", metavar="PATCH", action="append", default=[], help="leave this patch out (repeatable)"
    )


def lay_out(base: Base, wheel: Wheel, results: list[Result], out: Path) -> None:
    """Lay out `base` with the patches of `results` in the folder `out`, a new or empty one.

    Sources, overlay and tests are committed. Native libraries and the `.dist-info` lie beside them untracked, so that
    the folder also runs with PYTHONPATH set to it. Raises ForkError where a patch failed.
    """
    final = changes(results)
    with files.laid_out(out) as scratch:
        files.lay_out(base, wheel, scratch, native=True)
        git.init(scratch, ignored=_UNTRACKED)
        commit_series(scratch, f"vLLM {base.version}, from {wheel.file}", results)
        for path, data in final.items():
            assert (scratch / path).read_bytes() == data


def commit_series(folder: Path, first: str, results: list[Result]) -> None:
    """Commit the base that lies in `folder`, then each patch that changes something, tagged `base` and by name."""
    git.commit_all(folder, first)
    git.run(folder, "tag", "base")
    for result in results:
        if result.files:
            commit_patch(folder, result)
            git.run(folder, "tag", result.patch.name)


def commit_patch(folder: Path, result: Result, as_user: bool = False) -> None:
    """Write and commit the files of one patch."""
    for path, data in result.files.items():
        files.write(folder, path, data)
    git.run(folder, "add", "--force", "--", *result.files, as_user=as_user)
    git.commit(folder, result.patch.message, as_user=as_user)


def run(args: argparse.Namespace) -> int:
    base = find_base(args.base)
    wheel = base.wheel(args.device)
    out = files.new_folder(args.out)
    series = load_series()
    dropped = {find_patch(series, name).name for name in args.drop}
    results = evaluate(without(series, dropped), base.version, files.wheel_reader(wheel))
    lay_out(base, wheel, results, out)
    commits = git.run(out, "log", "--reverse", "--format=%s").splitlines()
    payload = {"base": base.name, "out": str(out), "commits": commits, "tree_hash": files.tree_hash(out)}
    say(f"{out}: {base.name} and {len(commits) - 1} patches", payload, args.json)
    return 0
