"""Lint: what the repository promises about the series, each promise broken once."""

import shutil
import subprocess

import pytest
from support import run_fork

from fork import ROOT, originality
from fork.bases import find_base
from fork.errors import ForkError

PATCH = "cpu-moe-prepack-reload"
OVERLAY = "vllm/model_executor/model_loader/attention_sink.py"


@pytest.fixture
def git_repo(repo):
    subprocess.run(["git", "init", "--quiet", repo], check=True)
    shutil.copytree(ROOT / "docs", repo / "docs")
    shutil.copy(ROOT / "README.md", repo)
    return repo


def _found(repo, *args) -> set[tuple[str, str]]:
    done = run_fork(repo, "lint", "--base", "0.32.0", "--json", *args)
    rows = done.json
    assert done.status == int(bool(rows)), done.err
    return {(row["check"], row["where"]) for row in rows}


def test_this_repository_has_no_finding(fork):
    """On one base; `make lint` looks at all."""
    done = fork("lint", "--base", "0.33.0")
    assert (done.status, done.out) == (0, "lint: every check holds\n"), done.out


def test_a_missing_test_or_overlay_file_is_found(git_repo):
    (git_repo / OVERLAY).unlink()
    rows = run_fork(git_repo, "lint", "--base", "0.33.0", "--json").json
    assert {(row["check"], row["where"]) for row in rows} >= {("files", "patches/attention-sink-loader")}
    assert any(OVERLAY in row["detail"] for row in rows)


def test_a_file_that_no_patch_owns_is_found(git_repo):
    stray = ["vllm/stray.py", "vllm/stray.json", "tests/models/conftest.py"]
    for path in stray:
        (git_repo / path).write_text("x = 1\n")
    assert _found(git_repo) == {("owners", path) for path in stray}


def test_a_file_of_a_patch_that_the_tool_does_not_read_is_found(git_repo):
    stray = git_repo / "patches" / PATCH / "edit" / "kernel-setup.yml"
    stray.parent.mkdir()
    stray.write_text("target: vllm/envs.py\n")
    assert _found(git_repo) == {("files", stray.relative_to(git_repo).as_posix())}


def test_a_fix_that_belongs_in_an_overlay_file_is_found(git_repo):
    path = next((git_repo / "patches" / PATCH / "edits").glob("*.yml"))
    path.write_text(path.read_text().replace("fix: |-\n", "fix: |-\n" + "".join(f"  x = {n}\n" for n in range(16)), 1))
    assert any(check == "rules" and where.startswith(f"patches/{PATCH}/edits/") for check, where in _found(git_repo))


def test_a_lock_of_a_base_that_the_patch_does_not_touch_is_found(git_repo):
    lock = git_repo / "patches" / PATCH / "lock.json"
    lock.write_text(lock.read_text().replace('"0.31.0"', '"0.30.0"'))
    rows = run_fork(git_repo, "lint", "--json").json
    assert {row["check"] for row in rows} == {"lock", "outcome", "docs"}


def test_a_page_that_the_series_does_not_make_so_is_found(git_repo):
    readme = git_repo / "README.md"
    readme.write_text(readme.read_text().replace("<!-- /patches -->", "a line by hand\n<!-- /patches -->"))
    (git_repo / "docs" / "differs-from-upstream.md").unlink()
    rows = run_fork(git_repo, "lint", "--json").json
    assert {(row["check"], row["where"]) for row in rows} == {
        ("docs", "README.md"),
        ("docs", "docs/differs-from-upstream.md"),
    }


def test_a_broken_series_is_a_finding_but_a_wheel_of_another_hash_is_an_error(git_repo, tmp_path):
    bad = tmp_path / "cache" / find_base("0.32.0").wheel().file
    bad.parent.mkdir()
    bad.write_bytes(b"no wheel")
    run_fork(git_repo, "lint", VLLM_FORK_CACHE=str(bad.parent)).refuses("wrong hash", bad.name)
    (git_repo / "patches" / PATCH / "PR.md").write_text("no title\n")
    assert _found(git_repo) == {("series", "patches")}


def test_code_copied_from_upstream_is_found_and_the_file_and_line_named(git_repo):
    with find_base("0.32.0").wheel().open() as wheel:
        text = wheel.read("vllm/model_executor/model_loader/weight_utils.py").decode()
    (git_repo / "fork" / "stolen.py").write_text("\n".join(text.splitlines()[200:260]) + "\n")
    rows = run_fork(git_repo, "lint", "--base", "0.32.0", "--json").json
    assert {row["check"] for row in rows} == {"originality"}
    assert all(row["where"].startswith("fork/stolen.py:") and "weight_utils.py:" in row["detail"] for row in rows)


@pytest.mark.parametrize(
    "name", ["Dockerfile", "notes.txt", "vllm/a.sh", 'fork/g\u00e9n "quoted".py', "fork/\udcff.py"]
)
def test_every_file_is_looked_at_whatever_its_name(git_repo, name, monkeypatch):
    (git_repo / name).write_bytes(b"x = 1  # not UTF-8: \xe9\n")
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))
    assert originality.project_files(git_repo)[name].startswith("x = 1")


def test_without_a_git_checkout_there_is_nothing_to_compare_and_that_is_an_error(repo, tmp_path):
    run_fork(repo, "lint", "--base", "0.32.0").refuses("git ls-files failed", "not a git repository")
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("/repo/fork\n")
    with pytest.raises(ForkError, match="git does not list fork/__init__"):
        originality.project_files(repo)


LINES = [f"value_{n} = compute_something({n})" for n in range(9)]


@pytest.mark.parametrize(("copied", "found"), [(4, 0), (5, 1), (9, 1)])
def test_a_run_is_five_meaningful_lines(copied, found):
    ours = "\n".join(LINES[:copied]) + "\nours = 'something else entirely'\n"
    theirs = "import os\n" + "\n".join(LINES)
    runs = originality.runs({"a.py": ours}, [("b.py", theirs)])
    assert len(runs) == found
    if found:
        assert (runs[0].path, runs[0].first, runs[0].last, runs[0].upstream) == ("a.py", 1, copied, "b.py:2")


def test_blanks_comments_imports_and_short_lines_do_not_break_or_make_a_run():
    ours = "\n".join(f"  {line.replace(' ', '  ')}\n# note\nimport x\n)" for line in LINES[:5])
    assert len(originality.runs({"a.py": ours}, [("b.py", "\n".join(LINES))])) == 1
    thin = "\n".join(["import aaaaaaaaaa", "# bbbbbbbbbbbbbbb", "return cccccccccc", "@dddddddddddddd", "x = 1"] * 3)
    assert originality.runs({"a.py": thin}, [("b.py", thin)]) == []


def test_two_separate_runs_are_two():
    ours = "\n".join([*LINES[:5], "between_the_two = 1", "and_one_more_line = 2", *LINES[:5]])
    assert [(r.first, r.last) for r in originality.runs({"a.py": ours}, [("b.py", "\n".join(LINES))])] == [
        (1, 5),
        (8, 12),
    ]
