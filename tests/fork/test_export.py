"""The export verb: mails that `git am` takes and that give the bytes of apply; the series on a real checkout."""

import shutil
from pathlib import Path

import pytest
from support import snapshot

from fork import files, git
from fork.bases import find_base
from fork.evaluate import APPLIED, changes, evaluate
from fork.series import load_series

CARRIED = ("0.32.0", "0.33.0", "0.31.0", "0.25.1")


def _clean_base(folder: Path, name: str) -> dict[str, bytes]:
    """A repository whose only commit is the clean tree of a base; return what the series makes of it."""
    base = find_base(name)
    files.lay_out(base, base.wheel(), folder, native=False, metadata=False)
    git.init(folder)
    git.commit_all(folder, "base")
    return changes(evaluate(load_series(), base.version, files.wheel_reader(base.wheel())))


@pytest.mark.parametrize("name", CARRIED)
def test_the_mails_apply_to_the_clean_base_and_give_the_bytes_of_apply(fork, tmp_path, name):
    done = fork("export", "--base", name, "--out", tmp_path / "mails", "--json")
    assert done.status == 0, done.err
    folder = tmp_path / "base"
    final = _clean_base(folder, name)
    before = {path: data for path, data in snapshot(folder).items() if not path.startswith(".git/")}
    mails = sorted((tmp_path / "mails").glob("*.patch"))
    assert [mail.name for mail in mails] == done.json["mails"]
    git.run(folder, "am", "--quiet", *map(str, mails))
    after = {path: data for path, data in snapshot(folder).items() if not path.startswith(".git/")}
    assert after == before | final
    base = find_base(name)
    results = evaluate(load_series(), base.version, files.wheel_reader(base.wheel()))
    assert len(mails) == sum(result.outcome == APPLIED for result in results)


def test_exporting_twice_gives_the_same_mails_and_never_over_others(fork, tmp_path):
    for out in ("one", "two"):
        assert fork("export", "--out", tmp_path / out).status == 0
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")
    fork("export", "--out", tmp_path / "one").refuses("is there and not empty")
    fork("export").refuses("either --out DIR for mails or --tree DIR", status=2)


def test_the_series_is_committed_onto_a_checkout_by_whoever_runs_it(fork, tmp_path):
    folder = tmp_path / "checkout"
    final = _clean_base(folder, "0.32.0")
    git.run(folder, "config", "user.name", "A Maintainer")
    git.run(folder, "config", "user.email", "a@maintainer.invalid")
    (folder / ".gitignore").write_text("tests/\n")
    git.commit_all(folder, "ignore")
    done = fork("export", "--base", "0.32.0", "--tree", folder, "--json")
    assert done.status == 0, done.err
    assert snapshot(folder).items() >= final.items()
    assert git.run(folder, "status", "--porcelain") == ""
    authors = git.run(folder, "log", "--format=%an", f"-{len(done.json['patches'])}").splitlines()
    assert set(authors) == {"A Maintainer"}


def test_a_checkout_that_is_dirty_or_of_another_version_is_left_alone(fork, tmp_path):
    folder = tmp_path / "checkout"
    _clean_base(folder, "0.32.0")
    head = git.run(folder, "rev-parse", "HEAD")
    fork("export", "--base", "0.25.1", "--tree", folder).refuses("mla-post-load-storage")
    (folder / "vllm" / "envs.py").write_text("mine\n")
    before = snapshot(folder / "vllm")
    fork("export", "--base", "0.32.0", "--tree", folder).refuses("is not the top of a clean work tree")
    assert snapshot(folder / "vllm") == before and git.run(folder, "rev-parse", "HEAD") == head
    shutil.rmtree(folder / ".git")
    fork("export", "--base", "0.32.0", "--tree", folder).refuses("git rev-parse failed")
