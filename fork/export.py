"""Write the series as mails for `git am`, or commit it onto a vLLM checkout: one pull request a patch."""

import argparse
import tempfile
from pathlib import Path

from fork import files, git
from fork.bases import Base, find_base
from fork.errors import ForkError, UsageError
from fork.evaluate import Reader, Result, changes, evaluate
from fork.report import say
from fork.series import load_series
from fork.tree import commit_patch, commit_series

HELP = "write `git am` mails, one a patch; with --tree commit the series onto a vLLM checkout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base", metavar="NAME", help="the base the mails apply to")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="which wheel of the base; cpu where it has one")
    parser.add_argument("--out", metavar="DIR", type=Path, help="a new folder for the mails")
    parser.add_argument("--tree", metavar="DIR", type=Path, help="a clean vLLM checkout to commit onto")


def run(args: argparse.Namespace) -> int:
    if bool(args.out) == bool(args.tree):
        raise UsageError("export takes either --out DIR for mails or --tree DIR to commit onto a checkout")
    base = find_base(args.base)
    if args.tree:
        results = _onto_checkout(args.tree, base)
        names = [result.patch.name for result in results if result.files]
        say(f"committed {len(names)} patches onto {args.tree}", {"tree": str(args.tree), "patches": names}, args.json)
        return 0
    out = files.new_folder(args.out)
    pristine = files.wheel_reader(base.wheel(args.device))
    results = evaluate(load_series(), base.version, pristine)
    changes(results)
    with files.laid_out(out) as scratch:
        mails = _mails(results, pristine, scratch)
    say(f"wrote {len(mails)} mails to {out}", {"base": base.name, "out": str(out), "mails": mails}, args.json)
    return 0


def _mails(results: list[Result], pristine: Reader, out: Path) -> list[str]:
    """Write one mail a patch into `out`; return their names. Only files that the series touches are laid out."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        git.init(folder)
        for path in {path for result in results for path in result.files}:
            if (text := pristine(path)) is not None:
                files.write(folder, path, text)
        commit_series(folder, "base", results)
        git.run(
            *(folder, "format-patch", "--quiet", "--zero-commit", "--full-index", "--no-signature"),
            *("--no-renames", "--output-directory", str(out), "base..HEAD"),
        )
    return sorted(path.name for path in out.iterdir())


def _onto_checkout(tree: Path, base: Base) -> list[Result]:
    """Commit each patch onto the checkout, as whoever runs this; what fails or is interrupted is taken back.

    Raises ForkError: another version, changes that are not committed, a failed patch, a failure that could not be
    taken back.
    """
    files.check_version(tree, base)
    if not git.is_clean(tree):
        raise ForkError(f"{tree} is not the top of a clean work tree; commit or stash there first")
    read = files.folder_reader(tree)
    results = evaluate(load_series(), base.version, read)
    added = [path for path in changes(results) if read(path) is None]
    head = git.run(tree, "rev-parse", "HEAD", as_user=True).strip()
    try:
        for result in results:
            if result.files:
                commit_patch(tree, result, as_user=True)
    except BaseException:
        _take_back(tree, head, added)
        raise
    return results


def _take_back(tree: Path, head: str, added: list[str]) -> None:
    """Give the checkout its commit `head` again; git does not remove those `added` files it was not yet told of."""
    try:
        with files.uninterrupted():
            git.run(tree, "reset", "--quiet", "--hard", head, as_user=True)
            for path in added:
                files.remove(tree, path)
    except (ForkError, OSError) as error:
        raise ForkError(f"{tree} is half-way: {error}; `git reset --hard {head}` there takes it back") from None
