"""The only module that calls git."""

import os
import subprocess
from pathlib import Path

from fork.errors import ForkError, one_line
from fork.files import uninterrupted

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


#: What of the environment says who the user is and how git is set up; the rest could lead to another repository.
_OF_THE_USER = ("GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_CONFIG_")


def run(folder: Path, *args: str, as_user: bool = False) -> str:
    """Run git in `folder` to its end, without hooks; return what it printed.

    Settings of the user and the machine are left out but `as_user`, who is then the author too instead of the project.
    Raises ForkError with the first and last line of what git said when it fails, and where there is no git.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    settings = ["core.hooksPath"]
    if as_user:
        env |= {key: value for key, value in os.environ.items() if key.startswith(_OF_THE_USER)}
    else:
        env |= _IDENTITY | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
        settings += ["core.excludesFile", "core.attributesFile"]
    command = ["git", "-C", str(folder)] + [word for key in settings for word in ("-c", f"{key}={os.devnull}")]
    if not as_user:
        # A checkout that another user owns, as in a container, is read all the same: no hook or setting of it runs.
        command += ["-c", "safe.directory=*"]
    try:
        # A git that is cut off leaves locks behind that stop the next one.
        with uninterrupted():
            done = subprocess.run([*command, *args], capture_output=True, text=True, errors="surrogateescape", env=env)
    except FileNotFoundError as error:
        raise ForkError(f"git: {error.strerror}; install git") from None
    if done.returncode:
        said = [line.strip() for line in (done.stderr or done.stdout).strip().splitlines()]
        reason = " .. ".join(dict.fromkeys(said[:1] + said[-1:]))
        raise ForkError(f"git {args[0]} failed in {folder}: {one_line(reason)}")
    return done.stdout


def init(folder: Path, ignored: tuple[str, ...] = ()) -> None:
    """Make `folder` a repository that keeps every byte as it is and does not see files that match `ignored`."""
    run(folder, "init", "--quiet", "--initial-branch", "main", "--template=")
    run(folder, "config", "core.autocrlf", "false")
    info = folder / ".git" / "info"
    info.mkdir()
    (info / "exclude").write_text("".join(f"{pattern}\n" for pattern in ignored))
    # Attributes that upstream ships must not change the bytes of a file.
    (info / "attributes").write_text("* -text\n")


def commit_all(folder: Path, message: str) -> None:
    """Commit every file as it is now."""
    run(folder, "add", "--all")
    commit(folder, message)


def commit(folder: Path, message: str, as_user: bool = False) -> None:
    """Commit what is staged, be it nothing."""
    run(folder, "commit", "--quiet", "--allow-empty", "--message", message, as_user=as_user)


def is_clean(folder: Path) -> bool:
    """Whether `folder` is the top of a work tree without changes."""
    top = run(folder, "rev-parse", "--show-toplevel", as_user=True).strip()
    changes = run(folder, "status", "--porcelain", "--untracked-files=normal", as_user=True)
    return Path(top).resolve() == folder.resolve() and not changes
