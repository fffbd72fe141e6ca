"""Base 0.33.0 loads attention sinks its own way: every sink of every model gets the same bytes there as in the fork."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fork import ROOT, files
from fork.bases import find_base
from fork.evaluate import changes, evaluate
from fork.series import load_series

BASE = find_base("0.32.0")
UPSTREAM = find_base("0.33.0-hybrid")


def sink_bytes(tree: Path, file: Path, *rows: str) -> dict[str, dict[str, list[dict[str, str]]]]:
    """By row and rank, what each sink parameter holds after a load and after a reload."""
    env = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(ROOT / "tests/fork/sink_bytes.py"), str(file), *rows]
    done = subprocess.run(command, cwd=file.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def fork_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base 0.32.0 with the series."""
    tree = tmp_path_factory.mktemp("fork") / "tree"
    results = evaluate(load_series(), BASE.version, files.wheel_reader(BASE.wheel()))
    files.link_tree(files.stock_tree(BASE), tree, changes(results))
    return tree


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[dict[str, str]]]]:
    return sink_bytes(files.stock_tree(UPSTREAM), tmp_path_factory.mktemp("upstream") / "sinks.json")


def test_every_sink_has_the_bytes_that_upstream_gives_it(fork_tree, upstream, tmp_path):
    ours = sink_bytes(fork_tree, tmp_path / "sinks.json")
    assert set(ours) == set(upstream)
    assert all(sinks for ranks in ours.values() for loads in ranks.values() for sinks in loads)
    assert {row: ranks for row, ranks in ours.items() if ranks != upstream[row]} == {}


def test_stock_has_them_after_a_load_but_not_after_a_reload(upstream, tmp_path):
    stock = sink_bytes(files.stock_tree(BASE), tmp_path / "sinks.json", "gpt-oss")
    for rank, (loaded, reloaded) in stock["gpt-oss"].items():
        assert loaded == upstream["gpt-oss"][rank][0]
        assert reloaded == loaded != upstream["gpt-oss"][rank][1]
