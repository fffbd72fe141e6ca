"""Write the series as mails for `git am`, or commit it onto a vLLM checkout: one pull request a patch."""

import argparse
import tempfile
from pathlib import Path

from packaging.version import Version

from fork import files, git
from fork.bases import find_base
from fork.errors import ForkError, UsageError
from fork.evaluate import Reader, Result, changes, evaluate
from fork.report import say
from fork.series import load_series
from fork.tree import commit_series

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
        results = _onto_checkout(args.tree, base.version)
        names = [result.patch.name for result in results if result.files]
        say(f"committed {len(names)} patches onto {args.tree}", {"tree": str(args.tree), "patches": names}, args.json)
        return 0
    results = evaluate(load_series(), base.version, files.wheel_reader(base.wheel(args.device)))
    changes(results)
    files.must_be_new(args.out)
    mails = _mails(results, files.wheel_reader(base.wheel(args.device)), args.out)
    say(f"wrote {len(mails)} mails to {args.out}", {"base": base.name, "out": str(args.out), "mails": mails}, args.json)
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
        out.mkdir(parents=True, exist_ok=True)
        git.run(
            *(folder, "format-patch", "--quiet", "--zero-commit", "--full-index", "--no-signature"),
            *("--no-renames", "--output-directory", str(out.resolve()), "base..HEAD"),
        )
    return sorted(path.name for path in out.glob("*.patch"))


def _onto_checkout(tree: Path, version: Version) -> list[Result]:
    """Commit each patch onto the checkout, as whoever runs this; nothing changes where one of them fails."""
    if not (tree / "vllm").is_dir():
        raise ForkError(f"{tree} is no vLLM checkout: it has no folder vllm")
    if not git.is_clean(tree):
        raise ForkError(f"{tree} is not the top of a clean work tree; commit or stash there first")
    results = evaluate(load_series(), version, files.folder_reader(tree))
    changes(results)
    for result in results:
        if result.files:
            for path, data in result.files.items():
                files.write(tree, path, data)
            git.run(tree, "add", "--force", "--", *result.files, own_identity=True)
            git.commit(tree, result.patch.message, own_identity=True)
    return results
