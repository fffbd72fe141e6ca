"""Patches a tree in place and takes the patches out again, by a journal.

The journal lies beside `vllm/` and names every file that is changed or added, with its hash before and after. It is
written first, and each run closes it last, so a run that was cut short is seen and can be taken back by the next one.
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fork import files
from fork.bases import Base
from fork.errors import ForkError
from fork.evaluate import Reader
from fork.files import sha256
from fork.rules import check_path

JOURNAL = ".vllm-fork.json"


@dataclass(frozen=True)
class Journal:
    """What was done to a tree: `state` is `applying`, `applied` once every file is written, `reverting` from then on.

    `files` maps a path to its sha256 before (None for an added file) and after.
    """

    state: str
    base: str
    files: dict[str, tuple[str | None, str]]


def read_journal(folder: Path) -> Journal | None:
    """The journal of a patched tree; None for a tree this tool never touched.

    Raises ForkError for a file that is no journal, or that names one outside a tree.
    """
    path = folder / JOURNAL
    if not path.exists():
        return None
    try:
        raw = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raw = None
    match raw:
        case {"state": "applying" | "applied" | "reverting" as state, "base": str(base), "files": dict(entries)} if all(
            _is_pair(entry) for entry in entries.values()
        ):
            for name in entries:
                check_path(name, str(path))
            return Journal(state, base, {name: (before, after) for name, (before, after) in entries.items()})
    raise ForkError(f"{path} is no journal of this tool; lay the tree out again")


def patch_tree(folder: Path, base: Base, pristine: Reader, final: dict[str, bytes]) -> bool:
    """Write the files `final` into the tree; what fails is taken back. False where the tree has just them already.

    Raises ForkError: another version, a tree patched otherwise or half-way, a file that differs from the base, a tree
    that is read-only, another run at work on it, a failure that could not be taken back.
    """
    files.check_version(folder, base)
    with files.alone(folder):
        journal = read_journal(folder)
        if journal:
            _must_be_just(folder, journal, final)
            return False
        _must_be_clean(folder, base, pristine, final)
        record = {path: (sha256(pristine(path)), str(sha256(data))) for path, data in final.items()}
        try:
            _write(folder, Journal("applying", base.name, record))
            for path, data in final.items():
                files.write(folder, path, data)
            _write(folder, Journal("applied", base.name, record))
        except BaseException:
            _take_back(folder, base, pristine)
            raise
        return True


def restore_tree(folder: Path, base: Base, pristine: Reader) -> list[str]:
    """Give a patched or half-patched tree the bytes of its base again; return the restored paths.

    Raises ForkError, changing nothing, where a file is neither as it was before nor after the patches, the tree is
    read-only or another run is at work on it. One that is cut short can be run again.
    """
    files.check_version(folder, base)
    with files.alone(folder):
        return _restore(folder, base, pristine)


def _restore(folder: Path, base: Base, pristine: Reader) -> list[str]:
    journal = read_journal(folder)
    if journal is None:
        files.remove(folder, JOURNAL + files.SCRATCH)
        return []
    _must_be_restorable(folder, base, journal, pristine)
    # What goes makes room for what is written, should the disk be full.
    for path in (JOURNAL, *journal.files):
        files.remove(folder, path + files.SCRATCH)
    if journal.state == "applied":
        _write(folder, replace(journal, state="reverting"))
    for path, (before, _) in journal.files.items():
        if before is None:
            files.remove(folder, path)
    read = files.folder_reader(folder)
    for path, (before, _) in journal.files.items():
        if sha256(read(path)) != before:
            files.write(folder, path, pristine(path) or b"")
    files.remove(folder, JOURNAL)
    return sorted(journal.files)


def _take_back(folder: Path, base: Base, pristine: Reader) -> None:
    try:
        with files.uninterrupted():
            _restore(folder, base, pristine)
    except (ForkError, OSError) as error:
        raise ForkError(f"{folder} is half-way: {error}; then `python -m fork revert` takes it back") from None


def _must_be_just(folder: Path, journal: Journal, final: dict[str, bytes]) -> None:
    """Raise ForkError where the patched tree has anything but `final`."""
    if journal.state != "applied":
        run = "an apply" if journal.state == "applying" else "a revert"
        raise ForkError(f"{folder} is half-way: {run} was cut short; `python -m fork revert` takes it back")
    wanted = {path: sha256(data) for path, data in final.items()}
    if {path: after for path, (_, after) in journal.files.items()} != wanted:
        raise ForkError(f"{folder} is patched with another series; `python -m fork revert` first")
    for path, digest in wanted.items():
        if sha256(files.folder_reader(folder)(path)) != digest:
            raise ForkError(f"{folder / path} was changed after it was patched; restore it, then revert")


def _must_be_clean(folder: Path, base: Base, pristine: Reader, final: dict[str, bytes]) -> None:
    """Raise ForkError where a file that `final` replaces is not as the base has it, or cannot be written."""
    read = files.folder_reader(folder)
    for path, data in final.items():
        if read(path) != pristine(path):
            what = "is patched already, without a journal" if read(path) == data else f"differs from base {base.name}"
            raise ForkError(f"{folder / path} {what}; only a clean tree is patched: lay it out again")
        _must_be_writable(folder, path)


def _must_be_restorable(folder: Path, base: Base, journal: Journal, pristine: Reader) -> None:
    """Raise ForkError where the tree cannot be given the bytes that `journal` says it had, or has others since."""
    if journal.base != base.name:
        raise ForkError(f"{folder} was patched from base {journal.base!r}, not {base.name}; give it as --base")
    read = files.folder_reader(folder)
    for path, (before, after) in journal.files.items():
        if sha256(read(path)) not in (before, after):
            raise ForkError(f"{folder / path} was changed after it was patched; save it elsewhere, then revert")
        if before is not None and sha256(pristine(path)) != before:
            raise ForkError(
                f"{path}: base {base.name} does not hold the text the tree had before; lay the tree out again"
            )
        _must_be_writable(folder, path)


def _must_be_writable(folder: Path, path: str) -> None:
    """The mode bits count even for a user who may write everywhere: a read-only tree is so on purpose."""
    target = folder / path
    while not target.exists():
        target = target.parent
    for place in (target, target if target.is_dir() else target.parent, folder):
        if not place.stat().st_mode & 0o222 or not os.access(place, os.W_OK):
            raise ForkError(f"{place} is read-only; a tree is patched in place: make it writable or lay out another")


def _is_pair(entry: object) -> bool:
    match entry:
        case [str() | None, str()]:
            return True
    return False


def _write(folder: Path, journal: Journal) -> None:
    files.write(folder, JOURNAL, (json.dumps(asdict(journal), indent=1) + "\n").encode())
