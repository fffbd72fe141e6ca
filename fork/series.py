"""The patch series: which patches there are, in what order, and what each header says."""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fork import ROOT
from fork.errors import ForkError, UsageError
from fork.rules import Rule, check_path, load_rules, read_text, specifier

#: Why a patch may be carried at all; nothing else is a reason.
REASONS = ("wrong-result", "unsafe-address", "silent-failure", "slow", "tooling")

_TEXT = ("title", "why", "origin", "forwarded", "bases", "remove-when")
_LISTS = ("adds", "tests", "depends")
_OPTIONAL = ("upstreamed-in",)


@dataclass(frozen=True)
class Patch:
    """One concern: its header, and the rules in its folder.

    `bases` and `upstreamed_in` are specifiers over base versions; `adds` are repository paths of the files it owns,
    `tests` those that go red without it, `depends` names of patches that must be applied before it.
    """

    name: str
    folder: Path
    title: str
    why: str
    origin: str
    forwarded: str
    bases: SpecifierSet
    upstreamed_in: SpecifierSet | None
    remove_when: str
    adds: tuple[str, ...]
    tests: tuple[str, ...]
    depends: tuple[str, ...]

    @cached_property
    def edits(self) -> tuple[Rule, ...]:
        """The rules that change a base, in order."""
        return load_rules(self.folder / "edits")

    @cached_property
    def proofs(self) -> tuple[Rule, ...]:
        """The rules that match where upstream has the patch already."""
        return load_rules(self.folder / "upstream")

    @cached_property
    def regress(self) -> tuple[Rule, ...]:
        """The rules that put the old fault back on a base that has the patch already. For tests alone."""
        return load_rules(self.folder / "regress")

    @property
    def message(self) -> str:
        """The pull request's title and text, as a commit message."""
        title, _, body = read_text(self.folder / "PR.md", f"patches/{self.name}/PR.md").partition("\n")
        return f"{title.removeprefix('#').strip()}\n\n{body.strip()}\n"

    def needed_on(self, version: Version) -> bool:
        return self.bases.contains(version, prereleases=True)

    def upstream_on(self, version: Version) -> bool:
        return self.upstreamed_in is not None and self.upstreamed_in.contains(version, prereleases=True)


def load_series(root: Path = ROOT) -> list[Patch]:
    """The patches in the order of patches/series.

    Raises ForkError: a name without a folder, a folder that is not named, a doubled name, a broken header, or a
    patch that depends on one that does not come before it.
    """
    folder = root / "patches"
    if not (folder / "series").is_file():
        raise ForkError("patches/series is missing; it names the patches in order, one a line")
    names = [line.strip() for line in read_text(folder / "series", "patches/series").splitlines() if line.strip()]
    there = {path.name for path in folder.iterdir() if path.is_dir()}
    for name in names:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise ForkError(f"patches/series names {name!r}; the name of a patch is small letters, digits and dashes")
        if name not in there:
            raise ForkError(
                f"patches/series names {name!r} but patches/{name} is missing; add the folder or the line goes"
            )
        if names.count(name) > 1:
            raise ForkError(f"patches/series names {name!r} more than once; keep one line")
    for name in sorted(there - set(names)):
        raise ForkError(f"patches/{name} is not named in patches/series; name it there or remove the folder")
    patches: list[Patch] = []
    for name in names:
        patch = _read_header(folder / name)
        for other in patch.depends:
            if other not in {p.name for p in patches}:
                raise ForkError(f"patches/{name} depends on {other!r}, which must come before it in patches/series")
        patches.append(patch)
    return patches


def find_patch(series: list[Patch], name: str) -> Patch:
    """The patch called `name`. Raises UsageError for an unknown name."""
    for patch in series:
        if patch.name == name:
            return patch
    raise UsageError(f"unknown patch {name!r}; the series has {', '.join(p.name for p in series)}")


def without(series: list[Patch], dropped: set[str]) -> list[Patch]:
    """The series less the patches called `dropped` and those that depend on them."""
    kept: list[Patch] = []
    gone = set(dropped)
    for patch in series:
        if patch.name in gone or gone & set(patch.depends):
            gone.add(patch.name)
        else:
            kept.append(patch)
    return kept


def _read_header(folder: Path) -> Patch:
    where = f"patches/{folder.name}/patch.toml"
    try:
        raw = tomllib.loads(read_text(folder / "patch.toml", where))
    except FileNotFoundError:
        raise ForkError(f"{where} is missing; every patch has a header") from None
    except tomllib.TOMLDecodeError as error:
        raise ForkError(f"{where} is not TOML: {error}") from None
    for key in raw:
        if key not in (*_TEXT, *_LISTS, *_OPTIONAL):
            raise ForkError(
                f"{where} has an unknown key {key!r}; the keys are {', '.join((*_TEXT, *_LISTS, *_OPTIONAL))}"
            )
    for key in _TEXT:
        if not isinstance(raw.get(key), str) or not raw[key].strip():
            raise ForkError(f"{where} lacks the text {key!r}")
    for key in _LISTS:
        if not isinstance(raw.get(key), list) or not all(isinstance(item, str) for item in raw[key]):
            raise ForkError(f"{where} lacks the list of texts {key!r}")
    for path in (*raw["adds"], *raw["tests"]):
        check_path(path, where)
    request = folder / "PR.md"
    if not request.is_file() or not re.match(r"# \S", read_text(request, f"patches/{folder.name}/PR.md")):
        raise ForkError(f"patches/{folder.name}/PR.md must start with a `# title`; the pull request's text follows it")
    if raw["why"] not in REASONS:
        raise ForkError(f"{where} says why = {raw['why']!r}; the reasons are {', '.join(REASONS)}")
    forwarded = raw["forwarded"]
    if not (forwarded == "no" or forwarded.startswith(("https://", "not-needed: "))):
        raise ForkError(f"{where} says forwarded = {forwarded!r}; it is a url, 'no', or 'not-needed: <reason>'")
    return Patch(
        name=folder.name,
        folder=folder,
        title=raw["title"],
        why=raw["why"],
        origin=raw["origin"],
        forwarded=forwarded,
        bases=specifier(raw["bases"], where),
        upstreamed_in=specifier(raw["upstreamed-in"], where) if "upstreamed-in" in raw else None,
        remove_when=raw["remove-when"],
        adds=tuple(raw["adds"]),
        tests=tuple(raw["tests"]),
        depends=tuple(raw["depends"]),
    )
