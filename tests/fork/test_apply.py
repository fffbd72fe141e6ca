"""Apply is exact, atomic and idempotent; revert restores the tree's hash, of a half-patched one too."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import BASE, run_fork, snapshot

from fork import ROOT, files
from fork.bases import find_base
from fork.evaluate import changes, evaluate
from fork.files import JOURNAL
from fork.series import load_series


def _targets() -> list[str]:
    """The files of the default base that the series changes."""
    base = find_base(BASE)
    read = files.wheel_reader(base.wheel())
    return sorted(path for path in changes(evaluate(load_series(), base.version, read)) if read(path) is not None)


def test_apply_twice_changes_nothing_and_revert_restores_every_byte(fork, tree):
    before = snapshot(tree)
    first = fork("apply", "--tree", tree, "--json")
    assert first.status == 0 and first.json["changed"], first.err
    patched = snapshot(tree)
    changed = {path for path in patched if patched[path] != before.get(path)}
    assert changed == {*first.json["files"], JOURNAL}
    second = fork("apply", "--tree", tree, "--json")
    assert second.status == 0 and not second.json["changed"]
    assert second.json["tree_hash"] == first.json["tree_hash"] and snapshot(tree) == patched
    back = fork("revert", "--tree", tree, "--json")
    assert back.status == 0 and back.json["tree_hash"] != first.json["tree_hash"]
    assert snapshot(tree) == before
    assert fork("revert", "--tree", tree, "--json").json["files"] == []


def test_without_a_tree_one_is_laid_out_and_patched(repo):
    done = run_fork(repo, "apply", "--base", "0.25.1", "--json")
    assert done.status == 0, done.err
    tree = repo / "build" / "trees" / "0.25.1"
    assert (tree / "vllm" / "__init__.py").exists() and not list(tree.rglob("*.so"))
    assert run_fork(repo, "revert", "--base", "0.25.1").status == 0
    assert not (tree / JOURNAL).exists() and not (tree / "tests").exists()


def test_a_tree_of_another_version_is_refused(fork, tree):
    before = snapshot(tree)
    fork("apply", "--tree", tree, "--base", "0.31.0").refuses("is vLLM 0.32.0, not 0.31.0")
    fork("revert", "--tree", tree, "--base", "0.31.0").refuses("is vLLM 0.32.0, not 0.31.0")
    assert snapshot(tree) == before


def test_a_folder_that_is_no_tree_is_refused(fork, tmp_path):
    fork("apply", "--tree", tmp_path / "none").refuses("is not there")
    fork("apply", "--tree", tmp_path).refuses("is no vLLM tree")
    assert list(tmp_path.iterdir()) == []


def test_a_tree_patched_by_other_means_is_refused(fork, tree):
    fork("apply", "--tree", tree)
    (tree / JOURNAL).unlink()
    before = snapshot(tree)
    fork("apply", "--tree", tree).refuses("is patched already, without a journal")
    assert snapshot(tree) == before


def test_a_tree_with_a_target_changed_by_hand_is_refused(fork, tree):
    path = tree / _targets()[0]
    path.write_bytes(path.read_bytes() + b"# mine\n")
    before = snapshot(tree)
    fork("apply", "--tree", tree).refuses("differs from base 0.32.0")
    assert snapshot(tree) == before


def test_a_patched_tree_with_a_file_changed_since_is_left_alone_by_apply_and_revert(fork, tree):
    fork("apply", "--tree", tree)
    path = tree / _targets()[0]
    path.write_bytes(path.read_bytes() + b"# mine\n")
    before = snapshot(tree)
    fork("apply", "--tree", tree).refuses("was changed after it was patched")
    fork("revert", "--tree", tree).refuses("was changed after it was patched", "save it elsewhere")
    assert snapshot(tree) == before


def test_a_tree_patched_with_another_series_is_refused(repo, fork, tree):
    fork("apply", "--tree", tree)
    before = snapshot(tree)
    series = repo / "patches" / "series"
    last = series.read_text().split()[-1]
    series.write_text(series.read_text().replace(f"{last}\n", ""))
    shutil.rmtree(repo / "patches" / last)
    run_fork(repo, "apply", "--tree", tree).refuses("patched with another series", "revert")
    assert snapshot(tree) == before


def test_a_read_only_tree_is_refused_before_anything_is_written(fork, tree):
    path = tree / _targets()[0]
    for place, mode in ((path, 0o444), (path.parent, 0o555), (tree, 0o555)):
        old = place.stat().st_mode
        place.chmod(mode)
        before = snapshot(tree)
        fork("apply", "--tree", tree).refuses("is read-only")
        assert snapshot(tree) == before
        place.chmod(old)


def test_a_failure_while_writing_takes_everything_back(tree, monkeypatch):
    base = find_base(BASE)
    read = files.wheel_reader(base.wheel())
    before = snapshot(tree)
    new = {"vllm/__init__.py": b"a = 1\n", "vllm/new/module.py": b"b = 2\n", "vllm/envs.py": b"c = 3\n"}
    real = files.write

    def write(folder, path, data):
        if path == "vllm/envs.py" and data == b"c = 3\n":
            raise OSError(28, "No space left on device")
        real(folder, path, data)

    monkeypatch.setattr(files, "write", write)
    with pytest.raises(OSError, match="No space"):
        files.patch_tree(tree, base, ["x"], read, new)
    assert snapshot(tree) == before


def _slow_apply(tree: Path, pause: float) -> subprocess.Popen[str]:
    """A process that applies the series and waits `pause` seconds after each write; returned after its first."""
    program = (
        "import sys, time; from fork import files, __main__; real = files.write\n"
        f"files.write = lambda *args: (real(*args), print('one', flush=True), time.sleep({pause}))\n"
        f"sys.exit(__main__.main(['apply', '--tree', {str(tree)!r}]))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "one\n"
    return run


def test_a_killed_run_is_seen_refused_and_taken_back(fork, tree):
    """A process killed between two files leaves a journal that says `applying`."""
    before = snapshot(tree)
    run = _slow_apply(tree, 60)
    run.send_signal(signal.SIGKILL)
    run.wait()
    half = snapshot(tree)
    assert half != before and json.loads(half[JOURNAL])["state"] == "applying"
    fork("apply", "--tree", tree).refuses("half-way", "`python -m fork revert`")
    assert snapshot(tree) == half
    assert fork("revert", "--tree", tree).status == 0
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "fork: interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_an_interrupt_while_writing_takes_everything_back(tree, number, status, said):
    before = snapshot(tree)
    run = _slow_apply(tree, 2)
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (status, said)
    assert snapshot(tree) == before


def test_of_two_runs_at_once_one_patches_and_the_other_is_told(fork, tree):
    run = _slow_apply(tree, 5)
    fork("apply", "--tree", tree).refuses("another run is at work")
    fork("revert", "--tree", tree).refuses("another run is at work")
    assert run.wait(timeout=120) == 0
    assert not fork("apply", "--tree", tree, "--json").json["changed"]
