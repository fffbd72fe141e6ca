"""The real tool on real wheels: a copy of the repository to break, and laid-out trees to patch."""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support import BASE, Done, run_fork

from fork import ROOT, files
from fork.bases import find_base

# Where these tests run in the background of a script, Ctrl-C is ignored, and so would the programs be deaf to it that
# they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def fork() -> Callable[..., Done]:
    """Run the tool in this repository."""
    return lambda *args, **env: run_fork(ROOT, *args, **env)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A copy of this repository that a test may break."""
    copy = tmp_path / "repo"
    for name in ("fork", "patches", "tests", "vllm"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def _laid_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = find_base(BASE)
    folder = tmp_path_factory.mktemp("base") / "tree"
    files.lay_out(base, base.wheel(), folder, native=False)
    return folder


@pytest.fixture
def tree(_laid_out: Path, tmp_path: Path) -> Path:
    """A clean tree of the default base, without native files."""
    return Path(shutil.copytree(_laid_out, tmp_path / "tree"))
