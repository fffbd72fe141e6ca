"""What the series does to a base: computed in memory, every patch with its named outcome, nothing written."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from fork import ROOT
from fork.errors import ForkError
from fork.region import MODULE, Regions, definitions, read_lock, touched
from fork.rules import Match, Rule, find, overlap, rewrite
from fork.series import Patch

APPLIED = "applied"
ALREADY_UPSTREAM = "already-upstream"
NOT_FOR_THIS_BASE = "not-for-this-base"
TARGET_MISSING = "target-missing"
ANCHOR_MISSING = "anchor-missing"
ANCHOR_COUNT = "anchor-count"
REGION_CHANGED = "region-changed"

#: Every outcome a patch can have on a base; the last four are failures.
OUTCOMES = (APPLIED, ALREADY_UPSTREAM, NOT_FOR_THIS_BASE, TARGET_MISSING, ANCHOR_MISSING, ANCHOR_COUNT, REGION_CHANGED)
FAILURES = OUTCOMES[3:]

#: Reads one file of a tree by its path; None where it has no such file.
Reader = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Result:
    """What one patch does to one base. `files` holds the whole new text of every file it changes or adds."""

    patch: Patch
    outcome: str
    detail: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    regions: Regions = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES


class _Failure(Exception):
    def __init__(self, outcome: str, detail: str):
        self.outcome, self.detail = outcome, detail


def evaluate(
    series: list[Patch], version: Version, read: Reader, root: Path = ROOT, locked: bool = True
) -> list[Result]:
    """Apply `series` in memory to the tree that `read` reads, one result a patch, in order.

    A patch that fails changes nothing and the next one goes on from the state before it. With `locked` false the lock
    is not asked, which is how a new lock is made.
    """
    state: dict[str, bytes] = {}
    results = []
    for patch in series:
        result = _one(patch, version, read, state, root, locked)
        state |= result.files
        results.append(result)
    return results


def changes(results: list[Result]) -> dict[str, bytes]:
    """Every file the whole series changes or adds, with its final text. Raises ForkError where a patch failed."""
    final: dict[str, bytes] = {}
    for result in results:
        if result.failed:
            raise ForkError(f"{result.patch.name}: {result.outcome}: {result.detail}")
        final |= result.files
    return final


def _one(patch: Patch, version: Version, read: Reader, state: dict[str, bytes], root: Path, locked: bool) -> Result:
    try:
        if patch.upstream_on(version):
            _prove(patch, version, read)
            return Result(patch, ALREADY_UPSTREAM)
        if not patch.needed_on(version):
            return Result(patch, NOT_FOR_THIS_BASE)
        files, regions = _edit(patch.edits, version, read, state)
        if locked:
            _check_lock(patch, version, regions)
        for path in patch.adds:
            if read(path) is not None or path in state:
                raise _Failure(REGION_CHANGED, f"{path} is there already; the overlay only adds files")
            if not (root / path).is_file():
                raise _Failure(TARGET_MISSING, f"{path} is named in `adds` but missing; restore it or take it out")
            files[path] = (root / path).read_bytes()
        return Result(patch, APPLIED, files=files, regions=regions)
    except _Failure as failure:
        return Result(patch, failure.outcome, failure.detail)


def _edit(
    rules: tuple[Rule, ...], version: Version, read: Reader, state: dict[str, bytes]
) -> tuple[dict[str, bytes], Regions]:
    """The files that `rules` change, and the regions they touch."""
    files: dict[str, bytes] = {}
    regions: Regions = {}
    for rule in rules:
        if not rule.is_for(version):
            continue
        for target in rule.targets:
            pristine = read(target)
            text = next((held for held in (files.get(target), state.get(target)) if held is not None), pristine)
            if text is None:
                raise _Failure(TARGET_MISSING, f"{rule.name} is for {target}, which this tree does not have")
            found = _matches(rule, target, text)
            names = regions.setdefault(target, {})
            for match in found:
                for name, digest in touched(text, match, pristine or text).items():
                    names[f"{name}#{len(names)}" if name == MODULE else name] = digest
            files[target] = rewrite(text, found)
            _must_parse(files[target], rule, target)
    return files, regions


def _must_parse(text: bytes, rule: Rule, target: str) -> None:
    try:
        definitions(text)
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise ForkError(f"{rule.name} leaves {target} broken: {line}") from None


def regress(patch: Patch, version: Version, read: Reader) -> dict[str, bytes]:
    """The files of a base with the fault that `patch` mends put back, for tests of a base that has the cure."""
    try:
        files, _ = _edit(patch.regress, version, read, {})
    except _Failure as failure:
        raise ForkError(f"{patch.name}: {failure.outcome}: {failure.detail}") from None
    if not files:
        raise ForkError(f"{patch.name} has no regress rule for {version}")
    return files


def _prove(patch: Patch, version: Version, read: Reader) -> None:
    """Every proof rule matches, and there is at least one."""
    proofs = [rule for rule in patch.proofs if rule.is_for(version)]
    if not proofs:
        raise _Failure(
            ANCHOR_MISSING, f"patches/{patch.name}/upstream has no rule for {version} to prove it is upstream"
        )
    for rule in proofs:
        for target in rule.targets:
            text = read(target)
            if text is None:
                raise _Failure(TARGET_MISSING, f"{rule.name} is for {target}, which this tree does not have")
            _matches(rule, target, text)


def _matches(rule: Rule, target: str, text: bytes) -> list[Match]:
    found = find(rule, text)
    if not found:
        raise _Failure(ANCHOR_MISSING, f"{rule.name} matches nothing in {target}")
    if len(found) != rule.matches:
        raise _Failure(ANCHOR_COUNT, f"{rule.name} matches {len(found)} times in {target}, not {rule.matches}")
    if rule.rewrites and overlap(found):
        raise _Failure(ANCHOR_COUNT, f"{rule.name} matches places of {target} that overlap; write one rule for each")
    return found


def _check_lock(patch: Patch, version: Version, regions: Regions) -> None:
    lock = read_lock(patch.folder).get(str(version), {})
    for target, names in lock.items():
        for name in names:
            if name not in regions.get(target, {}):
                raise _Failure(
                    REGION_CHANGED,
                    f"{target}: {name} is in the lock but no edit touches it; restore it, or `python -m fork lock`",
                )
    for target, names in regions.items():
        for name, digest in names.items():
            held = lock.get(target, {}).get(name)
            if held != digest:
                why = "has changed" if held else "is not in the lock"
                raise _Failure(REGION_CHANGED, f"{target}: {name} {why}; read it again, then `python -m fork lock`")
