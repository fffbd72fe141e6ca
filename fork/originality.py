"""Find where this repository repeats upstream code: it carries only what we wrote."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fork import git
from fork.bases import Base
from fork.errors import ForkError

#: How many consecutive meaningful lines make a run.
RUN = 5

_THIN = ("import ", "from ", "#", "//", "@", '"""', "'''", "return", "pass", "continue", "else:", "try:")


@dataclass(frozen=True)
class Run:
    """Lines `first` to `last` of our `path` stand letter for letter, blanks aside, at `upstream` of a base."""

    path: str
    first: int
    last: int
    upstream: str


def meaningful(text: str) -> list[tuple[int, str]]:
    """(line number, line without blanks) of each line long and particular enough to say where it came from."""
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [
        (number, "".join(line.split()))
        for number, line in lines
        if len("".join(line.split())) >= 10 and not line.startswith(_THIN)
    ]


def runs(ours: dict[str, str], upstream: Iterable[tuple[str, str]], length: int = RUN) -> list[Run]:
    """Every run of `length` or more meaningful lines that a file of `ours` shares with one of `upstream`.

    Both are path and text. Windows of `length` lines are compared; windows of ours that touch make one run.
    """
    windows: dict[tuple[str, ...], list[tuple[str, int]]] = {}
    numbered = {path: meaningful(text) for path, text in ours.items()}
    for path, lines in numbered.items():
        for start in range(len(lines) - length + 1):
            windows.setdefault(tuple(line for _, line in lines[start : start + length]), []).append((path, start))
    known = {line for window in windows for line in window}
    hits: dict[tuple[str, int], str] = {}
    for where, text in upstream:
        theirs = meaningful(text)
        for start in _windows_of_known(theirs, known, length):
            window = tuple(line for _, line in theirs[start : start + length])
            for hit in windows.get(window, ()):
                hits.setdefault(hit, f"{where}:{theirs[start][0]}")
    found: list[Run] = []
    end = ("", -1)
    for (path, start), where in sorted(hits.items()):
        last = numbered[path][start + length - 1][0]
        if end[0] == path and start <= end[1]:
            found[-1] = Run(path, found[-1].first, last, found[-1].upstream)
        else:
            found.append(Run(path, numbered[path][start][0], last, where))
        end = (path, start + length)
    return found


def _windows_of_known(lines: list[tuple[int, str]], known: set[str], length: int) -> Iterator[int]:
    """Where `length` consecutive lines are all in `known`."""
    streak = 0
    for position, (_, line) in enumerate(lines):
        streak = streak + 1 if line in known else 0
        if streak >= length:
            yield position - length + 1


def project_files(root: Path) -> dict[str, str]:
    """The text of every file of the repository, untracked ones too, whatever its name: any could repeat code.

    Raises ForkError where git does not list this repository's own files, so that nothing passes unseen.
    """
    listed = git.run(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    if "fork/__init__.py" not in listed:
        raise ForkError(f"git does not list fork/__init__.py in {root}; run the check in a git checkout of the project")
    return {path: (root / path).read_text("utf-8", "replace") for path in listed if (root / path).is_file()}


def upstream_files(bases: Iterable[Base]) -> Iterator[tuple[str, str]]:
    """Every Python file of every wheel of `bases`, each different text once."""
    seen: set[int] = set()
    for base in bases:
        for wheel in base.wheels.values():
            with wheel.open() as archive:
                for info in archive.infolist():
                    if info.filename.endswith(".py") and info.CRC not in seen:
                        seen.add(info.CRC)
                        yield f"{base.name}/{info.filename}", archive.read(info).decode(errors="replace")
