"""The export verb: mails that `git am` takes and that give the bytes of apply; the series on a real checkout."""

import os
import shutil
from pathlib import Path

import pytest
from support import run_fork, snapshot

from fork import ROOT, files, git
from fork.__main__ import main
from fork.bases import Wheel, find_base
from fork.evaluate import APPLIED, changes, evaluate
from fork.series import load_series

#: Who runs the tool.
_USER = {f"GIT_{who}_{what}": f"{who}@{what}.invalid" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
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


@pytest.fixture(scope="module")
def _committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkouts") / "checkout"
    _clean_base(folder, "0.32.0")
    (folder / ".gitignore").write_text("tests/\n_version.py\n")
    git.run(folder, "rm", "--quiet", "--cached", "vllm/_version.py")
    git.commit_all(folder, "as upstream's repository has it")
    return folder


@pytest.fixture
def checkout(_committed: Path, tmp_path: Path) -> Path:
    """A clean checkout of the default base."""
    return Path(shutil.copytree(_committed, tmp_path / "checkout"))


def _state(checkout: Path) -> tuple[str, str, dict[str, bytes], set[str]]:
    """What a run that fails must leave as it was: the commit, the index, every file, every folder."""
    inside = [path for path in checkout.rglob("*") if ".git" not in path.parts]
    return (
        git.run(checkout, "rev-parse", "HEAD"),
        git.run(checkout, "status", "--porcelain"),
        {str(path): path.read_bytes() for path in inside if path.is_file()},
        {str(path) for path in inside if path.is_dir()},
    )


def _git_that(folder: Path, verb: str, lines: str, nth: int = 1) -> dict[str, str]:
    """The environment with a git that runs `lines` of shell at the `nth` call of `verb`, and is git at any other."""
    folder.mkdir()
    program, count = folder / "git", folder / "count"
    program.write_text(
        f'#!/bin/bash\nreal() {{ {shutil.which("git")} "$@"; }}\n'
        f'case " $* " in *" {verb} "*) echo >>{count}; if [ "$(wc -l <{count})" = {nth} ]; then\n{lines}\nfi;; esac\n'
        'real "$@"\n'
    )
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("verb", ["add", "commit"])
@pytest.mark.parametrize(
    ("lines", "status", "said"),
    [
        ("echo 'fatal: no room' >&2; exit 1", 1, "fatal: no room"),
        ("kill -INT $PPID; sleep 1", 130, "interrupted"),
        ("kill -TERM $PPID; sleep 1", 143, ""),
    ],
)
def test_a_run_that_fails_or_is_interrupted_leaves_the_checkout_as_it_was(fork, checkout, verb, lines, status, said):
    before = _state(checkout)
    env = _git_that(checkout.parent / "bin", verb, lines, nth=2)
    done = fork("export", "--tree", checkout, **_USER, **env)
    assert (done.status, len(done.err.splitlines())) == (status, int(bool(said))) and said in done.err, done.err
    assert _state(checkout) == before


def test_a_checkout_that_cannot_be_set_back_is_said_to_be_half_way(fork, checkout):
    head = git.run(checkout, "rev-parse", "HEAD").strip()
    env = _git_that(checkout.parent / "bin", "commit", f"touch {checkout}/.git/index.lock; exit 1")
    fork("export", "--tree", checkout, **_USER, **env).refuses("is half-way", "index.lock", f"git reset --hard {head}")


def test_the_identity_of_the_environment_is_kept_and_no_hook_runs(fork, checkout):
    for hook in ("prepare-commit-msg", "post-commit", "post-index-change", "reference-transaction"):
        (checkout / ".git" / "hooks").mkdir(exist_ok=True)
        (checkout / ".git" / "hooks" / hook).write_text(f"#!/bin/sh\ntouch {checkout.parent}/{hook}\nexit 1\n")
        (checkout / ".git" / "hooks" / hook).chmod(0o755)
    done = fork("export", "--tree", checkout, "--json", HOME=str(checkout.parent), **_USER)
    assert done.status == 0, done.err
    said = git.run(checkout, "log", "--format=%an %ae %cn %ce", f"-{len(done.json['patches'])}")
    assert set(said.splitlines()) == {" ".join(_USER.values())}
    assert [path.name for path in checkout.parent.iterdir()] == ["checkout"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file away")
def test_a_repository_that_git_refuses_is_one_line_and_the_settings_of_the_user_count(fork, checkout):
    for path in (checkout, checkout / ".git"):
        os.chown(path, 12345, 12345)
    fork("export", "--tree", checkout).refuses("dubious ownership", "safe.directory")
    settings = checkout.parent / "settings"
    settings.write_text("[safe]\n\tdirectory = *\n[user]\n\tname = A\n\temail = a@b.invalid\n")
    done = fork("export", "--tree", checkout, GIT_CONFIG_GLOBAL=str(settings))
    assert done.status == 0, done.err


def test_a_checkout_that_is_dirty_or_of_another_version_is_left_alone(fork, checkout):
    (checkout / "vllm" / "envs.py").write_text("mine\n")
    before = _state(checkout)
    fork("export", "--base", "0.25.1", "--tree", checkout).refuses("is vLLM 0.32.0, not 0.25.1")
    fork("export", "--base", "0.32.0", "--tree", checkout).refuses("is not the top of a clean work tree")
    assert _state(checkout) == before
    git.run(checkout, "checkout", "--quiet", "vllm/envs.py")
    (checkout / "vllm" / "_version.py").unlink()
    before = _state(checkout)
    fork("export", "--base", "0.25.1", "--tree", checkout).refuses("mla-post-load-storage")
    assert _state(checkout) == before
    assert fork("export", "--base", "0.32.0", "--tree", checkout, **_USER).status == 0
    shutil.rmtree(checkout / ".git")
    fork("export", "--base", "0.32.0", "--tree", checkout).refuses("git rev-parse failed")


def test_an_export_that_fails_leaves_no_mail(fork, tmp_path):
    env = _git_that(tmp_path / "bin", "format-patch", 'real "$@"; exit 1')
    fork("export", "--out", tmp_path / "mails", **env).refuses("git format-patch failed")
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_an_export_reads_its_wheel_once(tmp_path, monkeypatch):
    fetched, real = [], Wheel.fetch
    monkeypatch.setattr(Wheel, "fetch", lambda wheel: fetched.append(wheel.file) or real(wheel))
    assert main(["export", "--base", "0.32.0", "--out", str(tmp_path / "mails")]) == 0
    assert fetched == [find_base("0.32.0").wheel().file]


def test_neither_a_template_nor_a_missing_git_gets_in_the_way(fork, tmp_path):
    """A template that git was built with is stood for by one that the environment names."""
    (tmp_path / "template").mkdir()
    env = _git_that(tmp_path / "bin", "init", f"export GIT_TEMPLATE_DIR={tmp_path}/template")
    done = fork("export", "--out", tmp_path / "mails", **env)
    assert done.status == 0, done.err
    fork("export", "--out", tmp_path / "none", PATH=str(tmp_path)).refuses("git: No such file", "install git")


@pytest.mark.parametrize("verb", ["export", "tree"])
def test_a_link_to_an_empty_folder_is_filled_and_the_folder_one_is_in_refused(fork, tmp_path, monkeypatch, verb):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    done = fork(verb, "--base", "0.25.1", "--out", tmp_path / "link")
    assert done.status == 0, done.err
    assert (tmp_path / "link").is_symlink() and any((tmp_path / "real").iterdir())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run_fork(Path("."), verb, "--base", "0.25.1", "--out", ".").refuses("is the folder you are in")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "link", "real"]
