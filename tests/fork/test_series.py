"""The series file, the headers, and the named outcomes of a patch on a base."""

import pytest
from support import BASE, run_fork, snapshot

from fork import ROOT
from fork.bases import load_bases
from fork.evaluate import FAILURES, OUTCOMES
from fork.series import load_series, without

PATCH = "cpu-moe-prepack-reload"


def _outcome(repo, *args: str) -> dict:
    rows = run_fork(repo, "status", "--base", BASE, "--json", *args).json
    return {row["patch"]: row for row in rows}[PATCH]


def _edit(path, *change: str) -> None:
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    """What `status` says of this repository."""
    done = run_fork(ROOT, "status", "--json")
    assert done.status == 0, done.err
    return done.json


def test_status_gives_one_named_outcome_for_every_patch_on_every_base_and_none_fails(rows):
    assert {(row["patch"], row["base"]) for row in rows} == {(p.name, b) for p in load_series() for b in load_bases()}
    assert len(rows) == len(load_series()) * len(load_bases())
    assert {row["outcome"] for row in rows} <= set(OUTCOMES) - set(FAILURES)


def test_the_patches_are_needed_where_the_design_says(rows):
    found = {(row["patch"], row["base"]): row["outcome"] for row in rows}
    for patch in ("mla-post-load-storage", "flashinfer-sink-refresh"):
        assert [found[patch, base] for base in ("0.25.1", "0.31.0", "0.32.0", "0.33.0")] == ["applied"] + [
            "already-upstream"
        ] * 3
    assert [found["attention-sink-loader", b] for b in ("0.25.1", "0.31.0", "0.32.0")] == ["applied"] * 3
    assert found["attention-sink-loader", "0.33.0"] == "already-upstream"
    assert {found["gpt-oss-expert-reload", base] for base in load_bases()} == {"applied"}
    assert {found[PATCH, b] for b in ("0.31.0", "0.32.0", "0.33.0", "0.33.0-hybrid")} == {"applied"}
    assert found[PATCH, "0.25.1"] == "not-for-this-base"


def test_a_name_without_a_folder_is_refused(repo):
    with (repo / "patches" / "series").open("a") as stream:
        stream.write("no-such-patch\n")
    run_fork(repo, "status").refuses("'no-such-patch'", "patches/no-such-patch is missing")


def test_a_folder_that_is_not_in_the_series_is_refused(repo):
    (repo / "patches" / "stray").mkdir()
    run_fork(repo, "status").refuses("patches/stray is not named")


def test_a_doubled_name_is_refused(repo):
    with (repo / "patches" / "series").open("a") as stream:
        stream.write(f"{PATCH}\n")
    run_fork(repo, "status").refuses("more than once")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('why = "wrong-result"', 'why = "it is nicer"'), "the reasons are wrong-result, unsafe-address"),
        (('forwarded = "no"', 'forwarded = "soon"'), "it is a url, 'no', or 'not-needed: <reason>'"),
        (("title = ", "titel = "), "unknown key 'titel'"),
        (("depends = []", 'depends = ["nothing"]'), "depends on 'nothing'"),
        (('why = "wrong-result"\n', ""), "lacks the text 'why'"),
        (('adds = ["tests/', 'adds = ["tests/../../'), "no file below vllm/ or tests/"),
        (("depends = []", "depends = [1]"), "lacks the list of texts 'depends'"),
        (("depends = []", "depends = ["), "is not TOML"),
        (('bases = "', 'bases = "about '), "version specifier that is none"),
        (("depends = []", "depends = []\nupstreamed-in = 5"), "version specifier that is none"),
    ],
)
def test_a_header_outside_the_closed_lists_is_refused(repo, change, words):
    _edit(repo / "patches" / PATCH / "patch.toml", *change)
    run_fork(repo, "status").refuses(f"patches/{PATCH}", words)


def test_a_patch_without_the_text_of_its_pull_request_is_refused(repo):
    text = repo / "patches" / PATCH / "PR.md"
    text.write_text("no title\n")
    run_fork(repo, "status").refuses(f"patches/{PATCH}/PR.md", "# title")
    text.unlink()
    run_fork(repo, "export", "--out", repo / "mails").refuses(f"patches/{PATCH}/PR.md", "# title")


def test_a_name_that_would_not_make_a_branch_or_a_tag_is_refused(repo):
    (repo / "patches" / PATCH).rename(repo / "patches" / "A..b")
    series = repo / "patches" / "series"
    series.write_text(series.read_text().replace(PATCH, "A..b"))
    run_fork(repo, "status").refuses("'A..b'", "small letters, digits and dashes")


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff", b'{"0.32.0": []}', b'{"0.32.0": {"vllm/a.py": {"f": 1}}}'])
def test_a_lock_that_is_none_is_refused(repo, text):
    lock = repo / "patches" / PATCH / "lock.json"
    lock.write_bytes(text)
    run_fork(repo, "status", "--base", BASE).refuses(f"patches/{PATCH}/lock.json")


def test_a_lock_that_is_none_is_not_written_over(repo):
    lock = repo / "patches" / PATCH / "lock.json"
    lock.write_bytes(b"[]")
    run_fork(repo, "lock").refuses(f"patches/{PATCH}/lock.json")
    assert lock.read_bytes() == b"[]"


def test_a_header_that_is_no_text_is_refused(repo):
    (repo / "patches" / PATCH / "patch.toml").write_bytes(b"\xff")
    run_fork(repo, "status").refuses(f"patches/{PATCH}/patch.toml is not UTF-8 text")


def test_a_patch_without_a_header_is_refused(repo):
    (repo / "patches" / PATCH / "patch.toml").unlink()
    run_fork(repo, "status").refuses(f"patches/{PATCH}/patch.toml is missing")


def test_an_added_file_that_is_gone_is_target_missing(repo):
    gone = next(p for p in load_series() if p.name == PATCH).adds[0]
    (repo / gone).unlink()
    row = _outcome(repo)
    assert row["outcome"] == "target-missing" and gone in row["detail"]


def test_a_moved_target_is_target_missing(repo):
    rule = next((repo / "patches" / PATCH / "edits").glob("*.yml"))
    _edit(rule, "target: vllm/", "target: vllm/moved/")
    assert _outcome(repo)["outcome"] == "target-missing"


def test_a_moved_anchor_is_anchor_missing_and_nothing_is_applied(repo, tree):
    rule = next((repo / "patches" / PATCH / "edits").glob("*.yml"))
    _edit(rule, "_setup_kernel", "_set_up_kernel")
    assert _outcome(repo)["outcome"] == "anchor-missing"
    before = snapshot(tree)
    run_fork(repo, "apply", "--tree", tree).refuses(PATCH, "anchor-missing", "matches nothing")
    assert snapshot(tree) == before


def test_a_wrong_count_is_anchor_count(repo):
    rule = next((repo / "patches" / PATCH / "edits").glob("*.yml"))
    _edit(rule, "matches: 1", "matches: 2")
    row = _outcome(repo)
    assert row["outcome"] == "anchor-count" and "not 2" in row["detail"]


def test_a_function_that_differs_from_the_lock_is_region_changed_until_it_is_locked_again(repo):
    lock = repo / "patches" / PATCH / "lock.json"
    _edit(lock, '"0.32.0"', '"0.32.9"')
    row = _outcome(repo)
    assert row["outcome"] == "region-changed" and "is not in the lock" in row["detail"]
    lock.write_text((ROOT / "patches" / PATCH / "lock.json").read_text())
    digest = lock.read_text().split('"0.32.0"')[1].split('": "')[1][:64]
    lock.write_text(lock.read_text().replace(digest, "f" * 64))
    row = _outcome(repo)
    assert row["outcome"] == "region-changed" and "has changed" in row["detail"]
    assert run_fork(repo, "lock", "--json").json == {"changed": [PATCH]}
    assert lock.read_text() == (ROOT / "patches" / PATCH / "lock.json").read_text()


def test_a_patch_that_upstream_lost_again_is_seen(repo):
    proof = next((repo / "patches" / "mla-post-load-storage" / "upstream").glob("*.yml"))
    proof.write_text(proof.read_text().replace("W_UV", "W_UVW"))
    rows = run_fork(repo, "status", "--base", BASE, "--json").json
    assert {row["patch"]: row["outcome"] for row in rows}["mla-post-load-storage"] == "anchor-count"


def test_dropping_a_patch_drops_what_depends_on_it():
    series = load_series()
    for patch in series:
        kept = {p.name for p in without(series, {patch.name})}
        assert patch.name not in kept
        assert all(set(p.depends) <= kept for p in without(series, {patch.name}))
