"""Regions: the functions an edit touches, and the lock that holds its hash on every base.

A rule may still match after upstream rewrote the function around it. The lock turns that into a named outcome: it
holds, for each base version, the sha256 of each touched function as that version has it. Hashes only, never text.
"""

import ast
import hashlib
import json
from functools import lru_cache
from pathlib import Path

from fork.errors import ForkError
from fork.rules import Match

#: What one patch touches on one base: target path -> qualified name -> sha256 in hex.
Regions = dict[str, dict[str, str]]

#: Name of the region of a match that no function holds.
MODULE = "<module>"

_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

#: What can hold a definition.
_HOLDERS = (ast.stmt, ast.excepthandler, ast.match_case)


def touched(text: bytes, match: Match, pristine: bytes) -> dict[str, str]:
    """Name -> sha256 of each definition that `match` touches in `text`, hashed as it is in `pristine`.

    These are the innermost function around all that is matched and cut, and every definition that is cut whole or in
    part. A match outside every definition is its own region: the name is `MODULE` and the hash that of its text.
    """
    start, end = match.span
    first = text.count(b"\n", 0, start) + 1
    last = text.count(b"\n", 0, end) + 1
    near = [
        (name, from_line <= first and last <= to_line and (from_line, to_line) != (first, last), is_class)
        for name, from_line, to_line, is_class in definitions(text)
        if from_line <= last and first <= to_line
    ]
    around = [name for name, is_around, is_class in near if is_around and not is_class][-1:]
    names = around + [name for name, is_around, _ in near if not is_around]
    if not names:
        return {MODULE: hashlib.sha256(text[start:end]).hexdigest()}
    lines = pristine.splitlines(keepends=True)
    # A name may be defined more than once, as overloads are: the region is all of them.
    held = dict.fromkeys(names, b"")
    for name, at, to, _ in definitions(pristine):
        if name in held:
            held[name] += b"".join(lines[at - 1 : to])
    return {name: hashlib.sha256(body).hexdigest() for name, body in held.items()}


@lru_cache(maxsize=1024)
def definitions(text: bytes) -> tuple[tuple[str, int, int, bool], ...]:
    """(qualified name, first line, last line, is a class) of every definition, outer ones first.

    Raises SyntaxError or ValueError for a text that is no Python. Kept, since rule after rule asks for the same texts.
    """
    found: list[tuple[str, int, int, bool]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _DEFS):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                name = prefix + child.name
                found.append((name, first, child.end_lineno or child.lineno, isinstance(child, ast.ClassDef)))
                walk(child, name + ".")
            elif isinstance(child, _HOLDERS):
                walk(child, prefix)

    walk(ast.parse(text), "")
    return tuple(found)


def read_lock(folder: Path) -> dict[str, Regions]:
    """The lock of the patch in `folder`: base version -> regions. Empty where there is none.

    Raises ForkError for a file that is no lock.
    """
    path = folder / "lock.json"
    try:
        lock = json.loads(path.read_bytes()) if path.exists() else {}
        for target, names in ((target, names) for regions in lock.values() for target, names in regions.items()):
            if not all(isinstance(text, str) for text in (target, *names, *names.values())):
                raise TypeError
    except (ValueError, TypeError, AttributeError):
        raise ForkError(f"patches/{folder.name}/lock.json is no lock; `python -m fork lock` writes a new one") from None
    return lock


def write_lock(folder: Path, lock: dict[str, Regions]) -> None:
    """Write the lock of the patch in `folder`, sorted; a patch that touches nothing has none."""
    path = folder / "lock.json"
    if lock:
        path.write_text(json.dumps(lock, indent=1, sort_keys=True) + "\n")
    else:
        path.unlink(missing_ok=True)
