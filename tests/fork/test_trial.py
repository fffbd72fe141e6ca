"""The trial verb is only worth its red: a patch whose test does not need it must be found out."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import run_fork

from fork import trial
from fork.bases import find_base
from fork.errors import ForkError
from fork.evaluate import ALREADY_UPSTREAM, APPLIED, Result
from fork.files import wheel_reader
from fork.series import find_patch, load_series

PATCH = "cpu-moe-prepack-reload"
TEST = "tests/model_executor/layers/test_cpu_moe_prepack_reload.py"
TARGET = "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py"
COMMAND = ("trial", PATCH, "--base", "0.32.0", "--json")

#: A test that starts a process, notes both in the file `pids` beside the repository, and does not end.
HANGS = """\
import os, pathlib, subprocess, time
def test_it():
    child = subprocess.Popen(["sleep", "600"])
    note = pathlib.Path({!r})
    note.with_name("new").write_text(f"{{os.getpid()}} {{child.pid}}")
    note.with_name("new").rename(note)
    time.sleep(600)
"""


@pytest.fixture(scope="session")
def _build(tmp_path_factory) -> Path:
    """One folder of laid-out bases for all copies of the repository."""
    return tmp_path_factory.mktemp("build")


@pytest.fixture
def repo(repo, _build) -> Path:
    (repo / "build").symlink_to(_build)
    return repo


@pytest.fixture
def try_out(repo):
    """Run the trial of one patch whose test file has these lines."""

    def run(lines: str, *args: str):
        (repo / TEST).write_text(lines)
        done = run_fork(repo, *COMMAND, *args)
        (row,) = done.json
        return done.status, row["passed"], row["failed"], row["verdict"]

    return run


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_test_that_needs_its_patch_passes_with_it_and_goes_red_without(try_out):
    stock = wheel_reader(find_base("0.32.0").wheel())(TARGET)
    lines = (
        "import importlib.util, pathlib\n"
        "def test_it():\n"
        "    place = pathlib.Path(importlib.util.find_spec('vllm').origin).parent.parent\n"
        f"    assert len((place / {TARGET!r}).read_bytes()) != {len(stock)}\n"
    )
    assert try_out(lines) == (0, 1, 0, "as it must")
    assert try_out(lines, "--drop") == (0, 0, 1, "as it must")


def test_a_test_that_passes_without_its_patch_is_found_out(try_out):
    assert try_out("def test_it():\n    assert True\n", "--drop") == (1, 1, 0, "WRONG")


@pytest.mark.parametrize(
    "lines",
    [
        "def test_it():\n    assert False\n",
        "import nothing_of_this_name\n",
        "x = 1\n",
        "import pytest\ndef test_it(): pass\ndef test_end(): pytest.exit('enough')\n",
    ],
)
def test_a_test_that_fails_does_not_load_stops_or_is_not_there_is_not_green(try_out, lines):
    status, _, _, verdict = try_out(lines)
    assert (status, verdict) == (1, "WRONG")


@pytest.mark.parametrize("drop", [(), ("--drop",)])
def test_a_run_that_pytest_does_not_report_on_proves_nothing(try_out, drop):
    assert try_out("import os\nos._exit(0)\n", *drop) == (1, 0, 1, "BROKE OFF")


@pytest.mark.parametrize("drop", [(), ("--drop",)])
def test_a_test_that_does_not_end_is_ended_with_all_it_started_and_failed(try_out, repo, tmp_path, drop):
    code = repo / "fork" / "trial.py"
    code.write_text(code.read_text().replace("LIMIT = 20 * 60\n", "LIMIT = 10\n"))
    assert try_out(HANGS.format(str(tmp_path / "pids")), *drop) == (1, 0, 1, "TIMED OUT")
    assert not any(_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_all_that_a_test_started_and_leaves_nothing(repo, tmp_path, number, status):
    pids, scratch = tmp_path / "pids", tmp_path / "scratch"
    scratch.mkdir()
    (repo / TEST).write_text(HANGS.format(str(pids)))
    command = [sys.executable, "-m", "fork", *COMMAND]
    tool = subprocess.Popen(command, cwd=repo, env=os.environ | {"TMPDIR": str(scratch)}, stderr=subprocess.PIPE)
    try:
        while not pids.exists():
            assert tool.poll() is None, tool.stderr.read()
            time.sleep(0.1)
        tool.send_signal(number)
        tool.communicate(timeout=60)
    finally:
        tool.kill()
    assert tool.returncode == status
    assert not any(_alive(int(pid)) for pid in pids.read_text().split())
    assert list(scratch.iterdir()) == []


def test_a_series_that_fails_on_the_base_is_not_passed_over(repo):
    lock = repo / "patches" / PATCH / "lock.json"
    lock.write_text(lock.read_text().replace('": "', '": "0'))
    run_fork(repo, *COMMAND).refuses(PATCH, "region-changed")


def test_a_patch_that_nothing_tries_is_an_error(fork):
    fork("trial", PATCH, "--base", "0.33.0").refuses(PATCH, "0.33.0", "--base")
    fork("trial", "--base", "0.25.1", "--drop").refuses("0.25.1", "--base")


def test_a_fault_is_put_back_into_the_text_that_the_series_leaves_be_it_empty():
    series, base = load_series(), find_base("0.32.0")
    patch, other = find_patch(series, "flashinfer-sink-refresh"), find_patch(series, PATCH)
    emptied = {target: b"" for rule in patch.regress for target in rule.targets}
    results = [Result(patch, ALREADY_UPSTREAM), Result(other, APPLIED, files=emptied)]
    with pytest.raises(ForkError, match="anchor-missing"):
        trial.changed_files(patch, series, base, results, wheel_reader(base.wheel()), drop=True)
