"""The command line: every verb is there, says what it does, and ends with a meaningful exit status."""

import subprocess
import sys

import pytest
from support import run_fork

from fork import ROOT
from fork.__main__ import VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_the_module_of_its_name_and_has_help_and_json(fork, verb):
    assert (ROOT / "fork" / f"{verb.replace('-', '_')}.py").is_file()
    done = fork(verb, "--help")
    assert done.status == 0 and "--json" in done.out


@pytest.mark.parametrize(
    "args", [(), ("no-such-verb",), ("status", "--no-such-option"), ("tree",), ("build", "--device", "tpu")]
)
def test_bad_usage_ends_with_status_2(fork, args):
    done = fork(*args)
    assert done.status == 2 and "usage:" in done.err and done.out == ""


def test_the_verbs_that_change_one_base_take_base_and_json(fork):
    for verb in ("status", "lint", "apply", "revert", "tree", "export", "build"):
        assert "--base" in fork(verb, "--help").out


def test_what_the_system_refuses_is_one_line_too(fork, tmp_path):
    (tmp_path / "file").write_text("")
    fork("status", VLLM_FORK_CACHE=str(tmp_path / "file" / "cache")).refuses("Not a directory")
    fork("tree", "--out", tmp_path / "new", PATH=str(tmp_path)).refuses("git: No such file or directory")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_reader_that_has_enough_is_no_error_of_ours():
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m fork bases --json | head -1"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[\n", "")


def test_a_missing_series_is_one_line(repo):
    (repo / "patches" / "series").unlink()
    run_fork(repo, "status").refuses("patches/series is missing")


def test_without_its_requirements_the_tool_says_in_one_line_how_to_get_them():
    """`-S` hides every installed package, as in a Python where `make setup` was not run."""
    done = subprocess.run([sys.executable, "-S", "-m", "fork", "status"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (1, "", 1), done.stderr
    assert "is not installed" in done.stderr and "make setup" in done.stderr


def test_an_older_python_is_told_so_in_one_line():
    program = "import sys; sys.version_info = (3, 10, 12); import fork"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("fork: Python 3.11 or later is needed, ") and len(done.stderr.splitlines()) == 1


def test_a_module_of_the_tool_that_is_missing_is_named_as_what_it_is(repo):
    (repo / "fork" / "region.py").unlink()
    done = run_fork(repo, "status")
    assert done.status == 1 and "No module named 'fork.region'" in done.err and "make setup" not in done.err
