"""Write what the series itself says best: docs/differs-from-upstream.md and the table of patches in README.md."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from fork import ROOT
from fork.bases import Base, load_bases
from fork.errors import ForkError
from fork.evaluate import ALREADY_UPSTREAM, APPLIED, Result, evaluate
from fork.files import wheel_reader
from fork.region import MODULE
from fork.report import Row, say
from fork.series import Patch, load_series

HELP = "write the pages made from the series; `lint` says where they are stale"

PAGE = "docs/differs-from-upstream.md"
README = "README.md"

#: The table in README.md stands between these two lines.
BEGIN, END = "<!-- patches -->", "<!-- /patches -->"

_INTRODUCTION = """\
<!-- Made by `python -m fork docs` from patches/; change the series, not this page. -->
# What differs from upstream vLLM

Every difference is a patch of the series. On a base a patch is `applied`, `already-upstream` (a rule proves that the
base has it) or `not-for-this-base`; any other outcome is a failure, named as `python -m fork status` names it.
"""

#: What every patch does on every base that users run: patch name -> base name -> result.
Outcomes = dict[str, dict[str, Result]]

#: Each base with what the series does to it.
Evaluated = Sequence[tuple[Base, list[Result]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser


def pages(root: Path = ROOT, evaluated: Evaluated | None = None) -> dict[str, str]:
    """Path and whole text of each page as the series below `root` makes it; `evaluated` saves doing that again.

    Raises ForkError: README.md has no place for its table, a broken series.
    """
    series = load_series(root)
    head, tail = _around_the_table(root / README)
    if evaluated is None:
        bases = [base for base in load_bases().values() if not base.tests_only]
        evaluated = [(base, evaluate(series, base.version, wheel_reader(base.wheel()), root)) for base in bases]
    outcomes: Outcomes = {patch.name: {} for patch in series}
    for base, results in evaluated:
        for result in results if not base.tests_only else ():
            outcomes[result.patch.name][base.name] = result
    return {PAGE: _page(series, outcomes), README: f"{head}\n{_summary(series, outcomes)}{tail}"}


def stale(root: Path = ROOT, evaluated: Evaluated | None = None) -> dict[str, str]:
    """The pages that are missing or say something else than `pages`, with the text they should have."""
    return {
        path: text
        for path, text in pages(root, evaluated).items()
        if not (root / path).is_file() or (root / path).read_bytes() != text.encode()
    }


def findings(root: Path = ROOT, evaluated: Evaluated | None = None) -> Iterator[Row]:
    """Each stale page, in the form of `fork.lint`: `check`, `where` and `detail`."""
    for path in stale(root, evaluated):
        yield {"check": "docs", "where": path, "detail": "is not what the series makes it; `python -m fork docs`"}


def run(args: argparse.Namespace) -> int:
    found = stale()
    for path, text in found.items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
    written = ", ".join(found) or "nothing, every page is up to date"
    say(f"written: {written}", {"written": list(found)}, args.json)
    return 0


def _around_the_table(path: Path) -> tuple[str, str]:
    """The text of README.md up to its first marker, and from its second one on."""
    text = path.read_text() if path.is_file() else ""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ForkError(f"README.md must have the lines `{BEGIN}` and `{END}` once, in this order; put them back")
    return text[: text.index(BEGIN)] + BEGIN, text[text.index(END) :]


def _summary(series: list[Patch], outcomes: Outcomes) -> str:
    """The table in README.md: one row a patch."""
    rows = [
        (
            f"[{patch.name}](patches/{patch.name}/PR.md)",
            patch.title,
            patch.origin,
            _bases(outcomes[patch.name], APPLIED),
            _bases(outcomes[patch.name], ALREADY_UPSTREAM),
        )
        for patch in series
    ]
    return _table(("patch", "what it changes", "the fault", "applied on", "upstream in"), rows)


def _page(series: list[Patch], outcomes: Outcomes) -> str:
    bases = list(next(iter(outcomes.values()), {}))
    grid = [(_anchor(patch), *(outcomes[patch.name][base].outcome for base in bases)) for patch in series]
    parts = [_INTRODUCTION, _table(("patch", *bases), grid)]
    return "\n".join([*parts, *(_section(patch, outcomes[patch.name]) for patch in series)])


def _section(patch: Patch, results: dict[str, Result]) -> str:
    """One patch: its header in words, and what it touches on which base."""
    lines = [
        f"## {patch.name}",
        "",
        f"{patch.title}. Text of the pull request: [PR.md](../patches/{patch.name}/PR.md).",
        "",
        f"- Carried because: `{patch.why}`. {patch.origin}.",
        f"- Forwarded: {patch.forwarded}. Removed when: {patch.remove_when}.",
        *([f"- Depends on: {', '.join(patch.depends)}."] if patch.depends else []),
        *(f"- On {bases} it changes {changed}." for changed, bases in _changes(results).items()),
        *_paths("Adds", patch.adds),
        *_paths("Goes red without it", patch.tests),
        "",
    ]
    return "\n".join(lines)


def _changes(results: dict[str, Result]) -> dict[str, str]:
    """What a patch changes in files of the base, in words -> the bases where it changes just that."""
    found: dict[str, list[str]] = {}
    for base, result in results.items():
        edited = [f"`{path}` ({', '.join(_functions(result, path))})" for path in sorted(result.regions)]
        if edited:
            found.setdefault(", ".join(edited), []).append(base)
    return {words: ", ".join(bases) for words, bases in found.items()}


def _functions(result: Result, path: str) -> list[str]:
    """The functions of `path` that the patch touches; a match outside every function is at the top level."""
    names = ("the top level" if name.startswith(MODULE) else f"`{name}`" for name in sorted(result.regions[path]))
    return list(dict.fromkeys(names))


def _paths(label: str, paths: tuple[str, ...]) -> list[str]:
    return [f"- {label}: {', '.join(f'[{path}](../{path})' for path in paths)}."] if paths else []


def _bases(results: dict[str, Result], outcome: str) -> str:
    return ", ".join(base for base, result in results.items() if result.outcome == outcome) or "none"


def _anchor(patch: Patch) -> str:
    return f"[{patch.name}](#{patch.name})"


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table; a bar inside a cell is escaped."""
    lines = [columns, ("---",) * len(columns), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
