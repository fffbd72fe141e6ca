"""Lays out, reads and writes the files of a tree: a folder with `vllm/` in it."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import signal
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fork import ROOT
from fork.bases import Base, Wheel
from fork.errors import ForkError
from fork.evaluate import Reader

#: Ends the name of a file that is being written.
SCRATCH = ".fork-new"

_VERSION = "vllm/_version.py"


class OvertakenError(ForkError):
    """Another run laid out the same folder in the meantime."""


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
        with suppress(OvertakenError), laid_out(folder) as scratch:
            lay_out(base, wheel, scratch, native=True)
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


@contextmanager
def laid_out(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `folder`, a new or empty one, at the end of the block.

    Nothing is left of it where the block fails. Raises OvertakenError where `folder` has been filled in the meantime.
    """
    beside = scratch_beside(folder)
    try:
        scratch = beside / folder.name
        scratch.mkdir()
        yield scratch
        try:
            scratch.rename(folder)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise OvertakenError(f"{folder} was filled by another run in the meantime; look at that one") from None
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def new_folder(path: Path) -> Path:
    """The folder that `path` leads to. Raises ForkError where it is not empty, or cannot be replaced."""
    folder = Path(os.path.realpath(path))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ForkError(f"{folder} is there and not empty; name a new folder with --out")
    if folder == Path.cwd():
        raise ForkError(f"{folder} is the folder you are in; name a new folder with --out")
    return folder


def write(folder: Path, path: str, data: bytes) -> None:
    """Write one file of a tree in one step, with the mode it had."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(target.name + SCRATCH)
    try:
        scratch.write_bytes(data)
        if target.exists():
            shutil.copymode(target, scratch)
        os.replace(scratch, target)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def remove(folder: Path, path: str) -> None:
    """Remove one file of a tree and the folders that this leaves empty; any of them may be gone already."""
    (folder / path).unlink(missing_ok=True)
    for parent in list(Path(path).parents)[:-1]:
        try:
            (folder / parent).rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM, from programs that are started too, until the block is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold `folder` for this run alone; the kernel lets go of it when the run ends, however it does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ForkError(f"another run is at work on {folder}; wait for it") from None
        yield
    finally:
        os.close(handle)


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


def check_version(folder: Path, base: Base) -> None:
    """Raise ForkError where `folder` is no vLLM tree, or one of another version than `base`."""
    if not (folder / "vllm").is_dir():
        raise ForkError(f"{folder} is no vLLM tree: it has no folder vllm; name one with --tree")
    path = folder / _VERSION
    found = re.search(r"__version__ = version = '([^']+)'", path.read_text(errors="replace")) if path.exists() else None
    if found and found[1].split("+")[0] != str(base.version):
        raise ForkError(f"{folder} is vLLM {found[1]}, not {base.version}; give --base the version of the tree")
