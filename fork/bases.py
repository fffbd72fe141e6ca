"""Bases: the pinned upstream wheels, fetched into a cache outside the repository and verified at every use."""

import argparse
import hashlib
import os
import tomllib
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from fork import pip
from fork.errors import ForkError, UsageError
from fork.report import Table, show

HELP = "list the pinned upstream wheels; fetch those of one base"
DEFAULT = "0.32.0"


@dataclass(frozen=True)
class Wheel:
    """One pinned upstream wheel. `device` is `cpu` or `cuda`; `sha256` is of the file, in hex."""

    device: str
    distribution: str
    version: str
    file: str
    sha256: str

    @property
    def cached(self) -> Path:
        """Where the file is kept, whether or not it is there."""
        return cache_folder() / self.file

    def fetch(self, again: bool = False) -> Path:
        """Path of the verified wheel, downloaded first where it is not cached (or bad, and `again` is set).

        Raises ForkError: no network, wrong hash, truncated file.
        """
        path = self.cached
        if again and path.exists() and _sha256(path) != self.sha256:
            path.unlink()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            pip.download(self.distribution, self.version, self.file, self.sha256, path.parent)
        found = _sha256(path)
        if found != self.sha256:
            mend = f"python -m fork bases --fetch {self.version} --device {self.device}"
            raise ForkError(
                f"wrong hash: {path} has sha256 {found[:12]}.., {path.stat().st_size} bytes, but fork/bases.toml pins "
                f"{self.sha256[:12]}..; fetch it again with `{mend}`"
            )
        return path

    def open(self) -> zipfile.ZipFile:
        """The verified wheel, open for reading."""
        return zipfile.ZipFile(self.fetch())


@dataclass(frozen=True)
class Base:
    """An upstream version the series is applied to.

    `wheels` maps a device to its wheel. `kernels` is None but for a hybrid, a base for tests only whose native files
    come from that CPU wheel.
    """

    name: str
    version: Version
    why: str
    wheels: dict[str, Wheel]
    kernels: Wheel | None = None

    @property
    def made_from(self) -> list[Wheel]:
        """Every wheel it needs, that of the kernels too."""
        return [*self.wheels.values(), *([self.kernels] if self.kernels else [])]

    @property
    def tests_only(self) -> bool:
        return self.kernels is not None

    @property
    def runs_on_cpu(self) -> bool:
        """Whether a laid-out tree of it can run without a GPU."""
        return self.kernels is not None or "cpu" in self.wheels

    def wheel(self, device: str | None = None) -> Wheel:
        """The wheel for `device`; without one the CPU wheel, or the CUDA wheel of a base that has no CPU wheel."""
        if device is None:
            device = "cpu" if "cpu" in self.wheels else "cuda"
        if device not in self.wheels:
            raise UsageError(f"base {self.name} has no {device} wheel; it has {', '.join(self.wheels)}")
        return self.wheels[device]


def cache_folder() -> Path:
    """$VLLM_FORK_CACHE, else the user's cache folder for this tool."""
    if path := os.environ.get("VLLM_FORK_CACHE"):
        return Path(path)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-fork"


def load_bases() -> dict[str, Base]:
    """Every base by name, in the order of bases.toml. Raises ForkError where that file is broken."""
    bases: dict[str, Base] = {}
    try:
        for name, entry in tomllib.loads(Path(__file__).with_name("bases.toml").read_text())["bases"].items():
            bases[name] = _base(name, entry, bases)
    except (KeyError, TypeError, ValueError) as error:
        where = f"fork/bases.toml, after base {next(reversed(bases), 'none')}"
        raise ForkError(f"{where}: {type(error).__name__}: {error}; its first lines say what a base has") from None
    return bases


def _base(name: str, entry: dict[str, Any], bases: dict[str, Base]) -> Base:
    if "kernels" in entry:
        source = bases[entry["python"]]
        return Base(name, source.version, entry["why"], source.wheels, bases[entry["kernels"]].wheel("cpu"))
    wheels: dict[str, Wheel] = {dev: Wheel(device=dev, **entry[dev]) for dev in ("cpu", "cuda") if dev in entry}
    return Base(name, Version(name), entry["why"], wheels)


def find_base(name: str | None) -> Base:
    """The base called `name`; without one $VLLM_FORK_BASE or the default. Raises UsageError for an unknown name."""
    bases = load_bases()
    name = name or os.environ.get("VLLM_FORK_BASE") or DEFAULT
    if name not in bases:
        raise UsageError(f"unknown base {name!r}; the bases are {', '.join(bases)}")
    return bases[name]


def _sha256(path: Path) -> str:
    """Read once a run, unless the file has changed since: a CUDA wheel has over 300 MB."""
    now = path.stat()
    return _digest(path, now.st_ino, now.st_size, now.st_mtime_ns)


@cache
def _digest(path: Path, *_file: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--fetch", metavar="NAME", help="fetch and verify the wheels of this base")
    one.add_argument("--base", metavar="NAME", help="list this base only")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="only the wheels for this device")


def run(args: argparse.Namespace) -> int:
    only = args.fetch or args.base
    bases = [find_base(only)] if only else list(load_bases().values())
    chosen = [(base, wheel) for base in bases for wheel in base.made_from if args.device in (None, wheel.device)]
    if only and not chosen:
        bases[0].wheel(args.device)  # raises, and says which it has
    for _, wheel in chosen if args.fetch else ():
        wheel.fetch(again=True)
    rows = [
        {
            "base": base.name,
            "device": wheel.device,
            "distribution": wheel.distribution,
            "version": wheel.version,
            "file": wheel.file,
            "sha256": wheel.sha256,
            "cached": wheel.cached.exists(),
            "tests_only": base.tests_only,
            "why": base.why,
        }
        for base, wheel in chosen
    ]
    show(Table("bases", rows, ("base", "device", "file", "cached", "why")), args.json)
    return 0
