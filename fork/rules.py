"""Structural edits: ast-grep rules that find a place by its shape and say what stands there afterwards."""

import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path, PurePosixPath

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from fork.errors import ForkError, one_line

_OURS = ("target", "matches", "bases")
_AST_GREP = ("language", "rule", "constraints", "utils", "transform", "fix")


@dataclass(frozen=True)
class Rule:
    """One ast-grep rule: `targets` are paths in the tree, each of which it matches exactly `matches` times.

    `name` says where it stands, `query` is the rule as ast-grep reads it, `rewrites` whether it has a fix and
    `new_lines` how many lines of that are not a captured piece of the place itself.
    """

    name: str
    targets: tuple[str, ...]
    matches: int
    bases: SpecifierSet | None
    query: str
    rewrites: bool
    new_lines: int

    def is_for(self, version: Version) -> bool:
        """Whether the rule is meant for a base of this version."""
        return self.bases is None or self.bases.contains(version, prereleases=True)


@dataclass(frozen=True)
class Match:
    """A place a rule matched: bytes `start` to `end` of the file; `replacement` stands for `cut`, a byte range."""

    start: int
    end: int
    cut: tuple[int, int]
    replacement: bytes

    @property
    def span(self) -> tuple[int, int]:
        """The byte range that is looked at or cut."""
        return min(self.start, self.cut[0]), max(self.end, self.cut[1])


def load_rules(folder: Path) -> tuple[Rule, ...]:
    """The rules of every .yml file in `folder`, in name order and then in the order they stand.

    Raises ForkError: a file of another kind, not YAML, no rule, an unknown key, no target, no match count.
    """
    paths = sorted(folder.iterdir()) if folder.is_dir() else []
    return tuple(rule for path in paths for rule in _read(path))


def _read(path: Path) -> list[Rule]:
    where = "/".join(path.parts[-4:])
    if path.suffix != ".yml":
        raise ForkError(f"{where} is no rule file; rules stand in files that end in .yml")
    try:
        documents = list(yaml.safe_load_all(read_text(path, where)))
    except yaml.YAMLError as error:
        raise ForkError(f"{where} is not YAML: {one_line(str(error))}") from None
    if not documents:
        raise ForkError(f"{where} holds no rule; write one or remove the file")
    return [_rule(f"{where}#{number}", raw) for number, raw in enumerate(documents, 1)]


def read_text(path: Path, where: str) -> str:
    """The text of a file of the series; ForkError names `where` it stands when it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ForkError(f"{where} is not UTF-8 text; save it as UTF-8") from None


def _rule(name: str, raw: object) -> Rule:
    if not isinstance(raw, dict):
        raise ForkError(f"{name} is not a mapping; a rule has a target, a match count and a rule")
    for key in raw:
        if key not in (*_OURS, *_AST_GREP):
            raise ForkError(f"{name} has an unknown key {key!r}; the keys are {', '.join((*_OURS, *_AST_GREP))}")
    targets = raw.get("target")
    targets = (targets,) if isinstance(targets, str) else targets
    if not targets or not isinstance(targets, list | tuple):
        raise ForkError(f"{name} has no target; name the file or files it is for")
    for target in targets:
        check_path(target, name)
    matches = raw.get("matches")
    if type(matches) is not int or matches < 1:
        raise ForkError(f"{name} has no match count; `matches` says how often it matches in each target")
    if "rule" not in raw:
        raise ForkError(f"{name} has no rule")
    bases = specifier(raw["bases"], name) if "bases" in raw else None
    query = {"id": "edit", "language": "python"} | {key: raw[key] for key in _AST_GREP if key in raw}
    fix = raw.get("fix", "")
    text = fix.get("template") if isinstance(fix, dict) else fix
    if not isinstance(text, str):
        raise ForkError(f"{name} has a fix that is none; a fix is a text, or a mapping with a template")
    new_lines = sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("$"))
    return Rule(name, tuple(targets), matches, bases, yaml.safe_dump(query), "fix" in raw, new_lines)


def check_path(path: object, where: str) -> None:
    """Raise ForkError, naming `where` it stands, for a path that is not one of a file inside a vLLM tree."""
    inside = isinstance(path, str) and path.startswith(("vllm/", "tests/")) and path == str(PurePosixPath(path))
    if not inside or ".." in PurePosixPath(str(path)).parts:
        raise ForkError(f"{where} names {path!r}, which is no file below vllm/ or tests/")


def specifier(text: object, where: str) -> SpecifierSet:
    """`text` as a version specifier; ForkError names `where` it stands when it is none."""
    if isinstance(text, str):
        with suppress(InvalidSpecifier):
            return SpecifierSet(text)
    raise ForkError(f"{where} has a version specifier that is none: {text!r}")


def find(rule: Rule, text: bytes) -> list[Match]:
    """Every place `rule` matches in `text`, in order. Raises ForkError where ast-grep does not take the rule."""
    try:
        return list(_scan(rule.query, text))
    except _NoAnswer as error:
        raise ForkError(f"{rule.name} {error}") from None


class _NoAnswer(Exception):
    """ast-grep gave no matches; why."""


@lru_cache(maxsize=1024)
def _scan(query: str, text: bytes) -> tuple[Match, ...]:
    """Kept, since bases share files and each starts a program."""
    with tempfile.TemporaryDirectory() as empty:
        # ast-grep reads an sgconfig.yml of the folder it is run in.
        done = subprocess.run(
            [_program(), "scan", "--stdin", "--json=compact", "--inline-rules", query],
            input=text,
            capture_output=True,
            cwd=empty,
        )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        causes = [line for line in said.splitlines() if "╰▻" in line] or [said]
        raise _NoAnswer(f"is no rule ast-grep takes: {one_line(causes[-1].lstrip(' ╰▻'))}")
    try:
        places = json.loads(done.stdout or b"[]")
    except ValueError:
        raise _NoAnswer(f"got no JSON from ast-grep: {one_line(done.stdout.decode(errors='replace'))}") from None
    found = []
    for raw in places:
        place = raw["range"]["byteOffset"]
        cut = raw.get("replacementOffsets", place)
        found.append(
            Match(place["start"], place["end"], (cut["start"], cut["end"]), raw.get("replacement", "").encode())
        )
    return tuple(sorted(found, key=lambda match: match.cut))


def overlap(matches: list[Match]) -> bool:
    """Whether two of `matches`, which are in order, cut the same bytes, so that one edit would be lost in the other."""
    return any(before.cut[1] > after.cut[0] for before, after in pairwise(matches))


def rewrite(text: bytes, matches: list[Match]) -> bytes:
    """`text` with each match replaced, from the last to the first; they are in order and do not overlap.

    ast-grep indents every line of a moved block, empty ones too: those blanks are stripped, inside the replacement
    alone. An empty replacement takes the whole of the lines it leaves blank.
    """
    for match in reversed(matches):
        start, end = match.cut
        lines = match.replacement.split(b"\n")
        new = b"\n".join(line if line.strip() else b"" for line in lines)
        if not new.strip():
            line_start = text.rfind(b"\n", 0, start) + 1
            line_end = text.find(b"\n", end)
            if line_end >= 0 and not text[line_start:start].strip() and not text[end:line_end].strip():
                start, end, new = line_start, line_end + 1, b""
        text = text[:start] + new + text[end:]
    return text


@lru_cache
def _program() -> str:
    """The ast-grep program of the environment this tool runs in."""
    beside = Path(sys.executable).with_name("ast-grep")
    found = str(beside) if beside.exists() else shutil.which("ast-grep")
    if not found:
        raise ForkError("ast-grep is not installed; `pip install ast-grep-cli`")
    return found
