"""The command line: every verb is there, says what it does, and ends with a meaningful exit status."""

import pytest
from support import run_fork

from fork import ROOT
from fork.__main__ import VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_the_module_of_its_name_and_has_help_and_json(fork, verb):
    assert (ROOT / "fork" / f"{verb}.py").is_file()
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


def test_a_missing_series_is_one_line(repo):
    (repo / "patches" / "series").unlink()
    run_fork(repo, "status").refuses("patches/series is missing")
