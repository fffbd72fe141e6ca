"""The only module that calls git."""

import os
import subprocess
from pathlib import Path

from fork.errors import ForkError, one_line

#: Who the commits of a laid-out tree are by, and when: fixed, so that the same series gives the same commits.
_IDENTITY = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "vllm-reload"),
        ("EMAIL", "maintainers@vllm-reload.invalid"),
        ("DATE", "2026-01-01T00:00:00+00:00"),
    )
}


def run(folder: Path, *args: str, own_identity: bool = False) -> str:
    """Run git in `folder`; return what it printed. Raise ForkError with git's last line when it fails.

    Settings of the user and the machine are left out. `own_identity` commits as whoever runs this tool instead of as
    the project.
    """
    plain = ("-c", f"core.excludesFile={os.devnull}", "-c", f"core.attributesFile={os.devnull}")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    if not own_identity:
        env |= _IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    done = subprocess.run(
        ["git", "-C", str(folder), *(() if own_identity else plain), *args], capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise ForkError(f"git {args[0]} failed in {folder}: {one_line(done.stderr or done.stdout)}")
    return done.stdout


def init(folder: Path, ignored: tuple[str, ...] = ()) -> None:
    """Make `folder` a repository that keeps every byte as it is and does not see files that match `ignored`."""
    run(folder, "init", "--quiet", "--initial-branch", "main")
    run(folder, "config", "core.autocrlf", "false")
    (folder / ".git" / "info" / "exclude").write_text("".join(f"{pattern}\n" for pattern in ignored))
    # Attributes that upstream ships must not change the bytes of a file.
    (folder / ".git" / "info" / "attributes").write_text("* -text\n")


def commit_all(folder: Path, message: str) -> None:
    """Commit every file as it is now."""
    run(folder, "add", "--all")
    commit(folder, message)


def commit(folder: Path, message: str, own_identity: bool = False) -> None:
    """Commit what is staged, be it nothing."""
    run(folder, "commit", "--quiet", "--no-verify", "--allow-empty", "--message", message, own_identity=own_identity)


def is_clean(folder: Path) -> bool:
    """Whether `folder` is the top of a work tree without changes."""
    top = run(folder, "rev-parse", "--show-toplevel").strip()
    return Path(top).resolve() == folder.resolve() and not run(folder, "status", "--porcelain").strip()
