"""Regions: the function an edit touches, and the lock that holds its hash on every base.

A rule may still match after upstream rewrote the function around it. The lock turns that into a named outcome: it
holds, for each base version, the sha256 of each touched function as that version has it. Hashes only, never text.
"""

import ast
import hashlib
import json
from functools import lru_cache
from pathlib import Path

from fork.rules import Match

#: What one patch touches on one base: target path -> qualified name -> sha256 in hex.
Regions = dict[str, dict[str, str]]

#: Name of the region of a match that no function holds.
MODULE = "<module>"

_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def touched(text: bytes, match: Match, pristine: bytes) -> tuple[str, str]:
    """(qualified name, sha256) of the innermost function around `match` in `text`, hashed as it is in `pristine`.

    A match outside every function is its own region: the name is `MODULE` and the hash that of the matched text.
    """
    first = text.count(b"\n", 0, match.start) + 1
    last = text.count(b"\n", 0, match.end) + 1
    around = [
        name
        for name, start, end, is_class in _definitions(text)
        if start <= first and last <= end and not (is_class and (start, end) != (first, last))
    ]
    if not around:
        return MODULE, hashlib.sha256(text[match.start : match.end]).hexdigest()
    name = around[-1]
    lines = pristine.splitlines(keepends=True)
    body = b"".join(
        b"".join(lines[start - 1 : end]) for found, start, end, _ in _definitions(pristine) if found == name
    )
    return name, hashlib.sha256(body).hexdigest()


@lru_cache(maxsize=64)
def _definitions(text: bytes) -> tuple[tuple[str, int, int, bool], ...]:
    """(qualified name, first line, last line, is a class) of every definition, outer ones first."""
    found: list[tuple[str, int, int, bool]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFS):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                name = prefix + child.name
                found.append((name, first, child.end_lineno or child.lineno, isinstance(child, ast.ClassDef)))
                walk(child, name + ".")
            else:
                walk(child, prefix)

    walk(ast.parse(text), "")
    return tuple(found)


def read_lock(folder: Path) -> dict[str, Regions]:
    """The lock of the patch in `folder`: base version -> regions. Empty where there is none."""
    path = folder / "lock.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_lock(folder: Path, lock: dict[str, Regions]) -> None:
    """Write the lock of the patch in `folder`, sorted; a patch that touches nothing has none."""
    path = folder / "lock.json"
    if lock:
        path.write_text(json.dumps(lock, indent=1, sort_keys=True) + "\n")
    else:
        path.unlink(missing_ok=True)
