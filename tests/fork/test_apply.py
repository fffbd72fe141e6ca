"""Apply is exact, atomic and idempotent; revert restores the tree's hash, of a half-patched one too."""

import json
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support import BASE, run_fork, snapshot

from fork import ROOT, files
from fork.bases import find_base
from fork.errors import ForkError
from fork.evaluate import changes, evaluate
from fork.journal import JOURNAL, patch_tree, read_journal, restore_tree
from fork.series import load_series

#: What a test patches in place of the series: two files of the base and a new one between them.
NEW = {"vllm/__init__.py": b"a = 1\n", "vllm/new/module.py": b"b = 2\n", "vllm/envs.py": b"c = 3\n"}


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
    tree = repo / "build" / "trees" / "0.25.1-cuda"
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


@pytest.mark.parametrize(("verb", "target"), [("apply", 0), ("revert", -1)])
def test_a_read_only_tree_is_refused_before_anything_is_written(fork, tree, verb, target):
    if verb == "revert":
        fork("apply", "--tree", tree)
    path = tree / _targets()[target]
    for place, mode in ((path, 0o444), (path.parent, 0o555), (tree, 0o555)):
        old = place.stat().st_mode
        place.chmod(mode)
        before = snapshot(tree)
        fork(verb, "--tree", tree).refuses("is read-only")
        assert snapshot(tree) == before
        place.chmod(old)


@cache
def _pristine(path: str) -> bytes | None:
    return files.wheel_reader(find_base(BASE).wheel())(path)


def _full_disk(monkeypatch: pytest.MonkeyPatch, *full: bytes | None) -> None:
    """Let writing any of the texts `full` fail, as on a disk without room."""
    real = files.write

    def write(folder, path, data):
        if data in full:
            raise OSError(28, "No space left on device")
        real(folder, path, data)

    monkeypatch.setattr(files, "write", write)


def test_a_failure_while_writing_takes_everything_back(tree, monkeypatch):
    before = snapshot(tree)
    _full_disk(monkeypatch, NEW["vllm/envs.py"])
    with pytest.raises(OSError, match="No space"):
        patch_tree(tree, find_base(BASE), _pristine, NEW)
    assert snapshot(tree) == before and not (tree / "vllm" / "new").exists()


def test_where_taking_back_fails_too_the_error_says_so_and_revert_does_it_later(fork, tree, monkeypatch):
    before = snapshot(tree)
    _full_disk(monkeypatch, NEW["vllm/envs.py"], _pristine("vllm/__init__.py"))
    with pytest.raises(ForkError, match=r"is half-way: .*No space.*`python -m fork revert` takes it back$"):
        patch_tree(tree, find_base(BASE), _pristine, NEW)
    fork("apply", "--tree", tree).refuses("is half-way: an apply was cut short")
    assert fork("revert", "--tree", tree).status == 0
    assert snapshot(tree) == before


def test_what_a_revert_removes_goes_before_it_writes_so_that_there_is_room(tree, monkeypatch):
    before = snapshot(tree)
    patch_tree(tree, find_base(BASE), _pristine, NEW)
    (tree / "vllm" / "envs.py.fork-new").write_bytes(b"of a run that was killed")
    seen, real = [], files.write

    def write(folder, path, data):
        if path != JOURNAL:
            seen.append(sorted(snapshot(folder).keys() - before.keys()))
        real(folder, path, data)

    monkeypatch.setattr(files, "write", write)
    restore_tree(tree, find_base(BASE), _pristine)
    assert seen == [[JOURNAL], [JOURNAL]] and snapshot(tree) == before


def test_a_revert_goes_on_where_folders_of_added_files_are_gone(tree):
    before = snapshot(tree)
    patch_tree(tree, find_base(BASE), _pristine, {"vllm/new/deep/er.py": b""})
    shutil.rmtree(tree / "vllm" / "new" / "deep")
    restore_tree(tree, find_base(BASE), _pristine)
    assert snapshot(tree) == before and not (tree / "vllm" / "new").exists()


def test_a_write_that_fails_leaves_no_scratch_file(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        files.write(tmp_path, "taken", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_journal_cut_short_before_its_first_byte_counted_is_cleaned_up(fork, tree):
    before = snapshot(tree)
    (tree / f"{JOURNAL}.fork-new").write_text('{"state": "app')
    assert fork("revert", "--tree", tree, "--json").json["files"] == []
    assert snapshot(tree) == before


def _journal(**changed: object) -> bytes:
    return json.dumps({"state": "applied", "base": BASE, "files": {}} | changed).encode()


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"[]", b"{}", b"\xff", b"[" * 100_000),
        *(_journal(state="done"), _journal(base=[]), _journal(files=[])),
        *(_journal(files={"vllm/a.py": pair}) for pair in ([None], [None, None], [1, ""], "ab")),
    ],
)
def test_what_is_no_journal_is_refused(tmp_path, text):
    (tmp_path / JOURNAL).write_bytes(_journal())
    assert read_journal(tmp_path)
    (tmp_path / JOURNAL).write_bytes(text)
    with pytest.raises(ForkError, match="is no journal of this tool"):
        read_journal(tmp_path)


@pytest.mark.parametrize("name", ["../mine.txt", "vllm/../../mine.txt"])
def test_a_forged_journal_cannot_name_a_file_outside_the_tree(fork, tree, name):
    (tree.parent / "mine.txt").write_bytes(b"mine")
    (tree / JOURNAL).write_bytes(_journal(files={name: [None, files.sha256(b"mine")]}))
    before = snapshot(tree.parent)
    for verb in ("apply", "revert"):
        fork(verb, "--tree", tree).refuses(str(tree / JOURNAL), f"names '{name}'")
    assert snapshot(tree.parent) == before


def _slow(verb: str, tree: Path, pause: float) -> subprocess.Popen[str]:
    """A process that says `one` for each file of the base that it writes, and waits `pause` seconds after the first.

    It is returned when that has been said.
    """
    program = (
        "import sys, time; from fork import files, __main__; real, done = files.write, []\n"
        "def write(folder, path, *more):\n"
        "    of_the_base = (folder / path).exists() and path.startswith('vllm/')\n"
        "    real(folder, path, *more)\n"
        "    if of_the_base:\n"
        "        done.append(print('one', flush=True))\n"
        f"        if len(done) == 1: time.sleep({pause})\n"
        "files.write = write\n"
        f"sys.exit(__main__.main([{verb!r}, '--tree', {str(tree)!r}]))"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "one\n"
    return run


@pytest.mark.parametrize(("verb", "what"), [("apply", "an apply"), ("revert", "a revert")])
def test_a_killed_run_is_seen_refused_and_taken_back(fork, tree, verb, what):
    """A process killed between two files leaves a journal that says what it was doing."""
    before = snapshot(tree)
    if verb == "revert":
        fork("apply", "--tree", tree)
    whole = snapshot(tree)
    run = _slow(verb, tree, 60)
    run.send_signal(signal.SIGKILL)
    run.wait()
    half = snapshot(tree)
    assert half not in (before, whole) and JOURNAL in half
    fork("apply", "--tree", tree).refuses(f"is half-way: {what} was cut short", "`python -m fork revert`")
    assert snapshot(tree) == half
    assert fork("revert", "--tree", tree).status == 0
    assert snapshot(tree) == before


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "fork: interrupted\n"), (signal.SIGTERM, 143, "")]
)
def test_an_interrupt_while_writing_takes_everything_back(tree, number, status, said):
    """A second one while that is done changes nothing."""
    before = snapshot(tree)
    run = _slow("apply", tree, 2)
    run.send_signal(number)
    assert run.stdout.readline() == "one\n"
    run.send_signal(number)
    _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (status, said)
    assert snapshot(tree) == before


def test_of_two_runs_at_once_one_patches_and_the_other_is_told(fork, tree):
    run = _slow("apply", tree, 20)
    fork("apply", "--tree", tree).refuses("another run is at work")
    fork("revert", "--tree", tree).refuses("another run is at work")
    assert run.wait(timeout=120) == 0
    assert not fork("apply", "--tree", tree, "--json").json["changed"]
