"""Structural edits: ast-grep rules that find a place by its shape and say what stands there afterwards."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
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


def load_rules(folder: Path) -> tuple[Rule, ...]:
    """The rules of every .yml file in `folder`, in name order and then in the order they stand.

    Raises ForkError: not YAML, an unknown key, no target, no match count.
    """
    return tuple(rule for path in sorted(folder.glob("*.yml")) for rule in _read(path))


def _read(path: Path) -> list[Rule]:
    where = "/".join(path.parts[-4:])
    try:
        documents = list(yaml.safe_load_all(path.read_text()))
    except yaml.YAMLError as error:
        raise ForkError(f"{where} is not YAML: {one_line(str(error))}") from None
    return [_rule(f"{where}#{number}", raw) for number, raw in enumerate(documents, 1)]


def _rule(name: str, raw: object) -> Rule:
    if not isinstance(raw, dict):
        raise ForkError(f"{name} is not a mapping; a rule has a target, a match count and a rule")
    for key in raw:
        if key not in (*_OURS, *_AST_GREP):
            raise ForkError(f"{name} has an unknown key {key!r}; the keys are {', '.join((*_OURS, *_AST_GREP))}")
    targets = raw.get("target")
    targets = (targets,) if isinstance(targets, str) else tuple(targets or ())
    if not targets:
        raise ForkError(f"{name} has no target; name the file or files it is for")
    for target in targets:
        check_path(target, name)
    matches = raw.get("matches")
    if type(matches) is not int or matches < 1:
        raise ForkError(f"{name} has no match count; `matches` says how often it matches in each target")
    if "rule" not in raw:
        raise ForkError(f"{name} has no rule")
    try:
        bases = SpecifierSet(raw["bases"]) if "bases" in raw else None
    except InvalidSpecifier:
        raise ForkError(f"{name} has a version specifier that is none: {raw['bases']!r}") from None
    query = {"id": "edit", "language": "python"} | {key: raw[key] for key in _AST_GREP if key in raw}
    fix = raw.get("fix", "")
    text = fix["template"] if isinstance(fix, dict) else fix
    new_lines = sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("$"))
    return Rule(name, targets, matches, bases, yaml.safe_dump(query), "fix" in raw, new_lines)


def check_path(path: object, where: str) -> None:
    """Raise ForkError, naming `where` it stands, for a path that is not one of a file inside a vLLM tree."""
    inside = isinstance(path, str) and path.startswith(("vllm/", "tests/")) and path == str(PurePosixPath(path))
    if not inside or ".." in PurePosixPath(str(path)).parts:
        raise ForkError(f"{where} names {path!r}, which is no file below vllm/ or tests/")


def find(rule: Rule, text: bytes) -> list[Match]:
    """Every place `rule` matches in `text`, in order. Raises ForkError where ast-grep does not take the rule."""
    done = subprocess.run(
        [_program(), "scan", "--stdin", "--json=compact", "--inline-rules", rule.query],
        input=text,
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace")
        causes = [line for line in said.splitlines() if "╰▻" in line] or [said]
        raise ForkError(f"{rule.name} is no rule ast-grep takes: {one_line(causes[-1].lstrip(' ╰▻'))}")
    found = []
    for raw in json.loads(done.stdout or b"[]"):
        place = raw["range"]["byteOffset"]
        cut = raw.get("replacementOffsets", place)
        found.append(
            Match(place["start"], place["end"], (cut["start"], cut["end"]), raw.get("replacement", "").encode())
        )
    return sorted(found, key=lambda match: match.start)


def rewrite(text: bytes, matches: list[Match]) -> bytes:
    """`text` with each match replaced, from the last to the first.

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
