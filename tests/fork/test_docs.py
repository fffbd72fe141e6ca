"""The pages made from the series: what they say, and that a stale one is seen."""

import shutil
from pathlib import Path

import pytest
from support import run_fork, snapshot

from fork import ROOT, docs
from fork.series import load_series

PATCH = "cpu-moe-prepack-reload"


@pytest.fixture(scope="session")
def _written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repo = tmp_path_factory.mktemp("pages") / "repo"
    for name in ("fork", "patches", "tests", "vllm"):
        shutil.copytree(ROOT / name, repo / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / docs.README, repo)
    done = run_fork(repo, "docs")
    assert done.status == 0, done.err
    return repo


@pytest.fixture
def written(_written: Path, tmp_path: Path) -> Path:
    """A copy of this repository with its pages up to date, for a test to break."""
    return Path(shutil.copytree(_written, tmp_path / "repo"))


def _change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


def test_pages_just_written_are_up_to_date_and_written_no_more(written):
    assert list(docs.findings(written)) == []
    assert run_fork(written, "docs", "--json").json == {"written": []}


def test_a_changed_header_makes_both_pages_stale(written):
    header = written / "patches" / PATCH / "patch.toml"
    _change(header, 'title = "', 'title = "Promptly ')
    before = snapshot(written)
    assert [row["where"] for row in docs.findings(written)] == [docs.PAGE, docs.README]
    assert snapshot(written) == before
    assert run_fork(written, "docs", "--json").json == {"written": [docs.PAGE, docs.README]}
    assert "Promptly" in (written / docs.PAGE).read_text() and "Promptly" in (written / docs.README).read_text()


def test_a_page_that_is_missing_or_changed_by_hand_is_stale(written):
    page = written / docs.PAGE
    for data in (page.read_bytes() + b"more\n", b"\xff"):
        page.write_bytes(data)
        assert [row["where"] for row in docs.findings(written)] == [docs.PAGE]
    page.unlink()
    assert [row["where"] for row in docs.findings(written)] == [docs.PAGE]


def test_only_the_table_of_the_readme_is_made(written):
    readme = written / docs.README
    readme.write_text("# Other words\n\n" + readme.read_text() + "\nand more\n")
    assert list(docs.findings(written)) == []
    _change(readme, docs.END, f"a line by hand\n{docs.END}")
    assert [row["where"] for row in docs.findings(written)] == [docs.README]


@pytest.mark.parametrize("old, new", [(docs.BEGIN, ""), (docs.END, ""), (docs.BEGIN, docs.BEGIN + "\n" + docs.BEGIN)])
def test_a_readme_without_its_two_markers_is_refused(written, old, new):
    _change(written / docs.README, old, new)
    before = snapshot(written)
    run_fork(written, "docs").refuses("README.md", docs.BEGIN, docs.END)
    assert snapshot(written) == before


def test_the_pages_say_what_status_says(written):
    outcomes = run_fork(written, "status", "--json").json
    page, readme = (written / docs.PAGE).read_text(), (written / docs.README).read_text()
    grid = [line for line in page.splitlines() if line.startswith("| ")]
    bases = [cell.strip() for cell in grid[0].strip("|").split("|")][1:]
    shown = {
        (cells[0].split("]")[0].strip("[ "), base): cell.strip()
        for cells in (line.strip("|").split("|") for line in grid[2:])
        for base, cell in zip(bases, cells[1:], strict=True)
    }
    assert shown == {(row["patch"], row["base"]): row["outcome"] for row in outcomes if "hybrid" not in row["base"]}
    for patch in load_series(written):
        assert f"\n## {patch.name}\n" in page and patch.title in page and patch.remove_when in page
        assert f"](patches/{patch.name}/PR.md)" in readme and patch.origin in readme
        for path in (*patch.adds, *patch.tests):
            assert f"](../{path})" in page


def test_the_page_names_the_functions_that_a_patch_touches(written):
    text = (written / docs.PAGE).read_text().split(f"## {PATCH}\n")[1].split("\n## ")[0]
    assert "unquantized_fused_moe_method.py` (`UnquantizedFusedMoEMethod._setup_kernel`)" in text
