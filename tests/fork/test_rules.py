"""Structural edits: exact counts, byte-exact rewriting, and the rules of the series themselves, valid and invalid."""

import ast
import dataclasses
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fork.bases import load_bases
from fork.errors import ForkError
from fork.evaluate import changes, evaluate
from fork.files import wheel_reader
from fork.region import MODULE, touched
from fork.rules import Match, find, load_rules, rewrite
from fork.series import load_series

RULE = """\
target: vllm/x.py
matches: 1
language: python
rule: {pattern: old($A)}
fix: new($A)
"""


def _rules(tmp_path: Path, text: str):
    folder = tmp_path / "edits"
    folder.mkdir(exist_ok=True)
    (folder / "a.yml").write_text(text)
    return load_rules(folder)


def _edit(tmp_path: Path, rule: str, text: str) -> str:
    (loaded,) = _rules(tmp_path, rule)
    return rewrite(text.encode(), find(loaded, text.encode())).decode()


def test_a_fix_keeps_what_it_captures_and_every_other_byte(tmp_path):
    assert _edit(tmp_path, RULE, "é = 1\r\nx = old( 2 )\t\nold(3)  # é\n") == "é = 1\r\nx = new(2)\t\nnew(3)  # é\n"


def test_blank_lines_of_a_moved_block_get_no_blanks_but_strings_elsewhere_keep_theirs(tmp_path):
    rule = RULE.replace("{pattern: old($A)}", "{kind: if_statement, pattern: $IF}").replace(
        "fix: new($A)", "fix: |-\n  $IF\n  else:\n      b()"
    )
    text = "def f():\n    if a:\n        a()\n\n        a()\n   \n    s = 1\n"
    assert (
        _edit(tmp_path, rule, text)
        == "def f():\n    if a:\n        a()\n\n        a()\n    else:\n        b()\n   \n    s = 1\n"
    )


def test_an_empty_fix_takes_the_whole_line_but_never_a_neighbour(tmp_path):
    rule = RULE.replace("fix: new($A)", 'fix: ""')
    assert _edit(tmp_path, rule, "a = 1\n    \nold(2)\n\nb = 2\n") == "a = 1\n    \n\nb = 2\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("matches: 1\n", ""), "no match count"),
        (("matches: 1", "matches: 0"), "no match count"),
        (("matches: 1", "matches: yes"), "no match count"),
        (("target: vllm/x.py\n", ""), "no target"),
        (("vllm/x.py", "vllm/../../x.py"), "no file below vllm/ or tests/"),
        (("vllm/x.py", "/etc/passwd"), "no file below vllm/ or tests/"),
        (("rule: {pattern: old($A)}\n", ""), "no rule"),
        (("language", "langauge"), "unknown key 'langauge'"),
        (("matches: 1", "matches: 1\nbases: newer"), "version specifier that is none: 'newer'"),
        (("rule: {", "rule: {{"), "is not YAML"),
        ((RULE, "- a list\n"), "is not a mapping"),
        ((RULE, "# nothing\n"), "holds no rule"),
        (("target: vllm/x.py", "target: 5"), "no target"),
        (("target: vllm/x.py", "target: [vllm/x.py, 5]"), "names 5"),
        (("target: vllm/x.py", "target: {vllm/x.py: 1}"), "no target"),
        (("matches: 1", "matches: 1\nbases: [1]"), "version specifier that is none"),
        (("fix: new($A)", "fix: [a]"), "fix is a text, or a mapping with a template"),
        (("fix: new($A)", "fix: {expandEnd: {regex: a}}"), "fix is a text, or a mapping with a template"),
    ],
)
def test_a_rule_that_says_too_little_or_too_much_is_refused(tmp_path, change, words):
    with pytest.raises(ForkError, match=words) as raised:
        _rules(tmp_path, RULE.replace(*change))
    assert "edits/a.yml" in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_that_is_no_text_or_no_rule_file_is_refused(tmp_path):
    folder = tmp_path / "edits"
    folder.mkdir()
    (folder / "a.yml").write_bytes(b"\xff\xfe")
    with pytest.raises(ForkError, match=r"edits/a.yml is not UTF-8 text"):
        load_rules(folder)
    (folder / "a.yml").rename(folder / "a.yaml")
    with pytest.raises(ForkError, match=r"edits/a.yaml is no rule file"):
        load_rules(folder)


def test_settings_of_ast_grep_where_the_tool_is_run_do_not_matter(tmp_path, monkeypatch):
    (tmp_path / "sgconfig.yml").write_text("ruleDirs: [nowhere]\nlanguageGlobs: {html: ['*']}\n")
    monkeypatch.chdir(tmp_path)
    assert _edit(tmp_path, RULE, "old(1)\n") == "new(1)\n"


def test_a_rule_that_ast_grep_does_not_take_is_refused_in_one_line(tmp_path):
    (rule,) = _rules(tmp_path, RULE.replace("{pattern: old($A)}", "{kind: no_such_node}"))
    with pytest.raises(ForkError, match="is no rule ast-grep takes") as raised:
        find(rule, b"old(1)\n")
    assert "\n" not in str(raised.value)


@given(
    st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=8), min_size=1, max_size=6),
    st.data(),
)
def test_rewriting_replaces_the_matched_bytes_and_no_others(pieces, data):
    texts = [piece.encode() for piece in pieces]
    text, matches, expected, position = b"", [], b"", 0
    for piece in texts:
        text += piece
        new = data.draw(st.binary(min_size=1, max_size=5).map(lambda raw: b"<" + raw.hex().encode() + b">"))
        matches.append(Match(position, position + len(piece), (position, position + len(piece)), new))
        expected += new
        position += len(piece)
    assert rewrite(text, matches) == expected


CARRIED = [base for base in load_bases().values() if not base.tests_only]


@pytest.mark.parametrize("base", CARRIED, ids=lambda base: base.name)
def test_every_edit_of_the_series_takes_on_its_base_and_leaves_python(base):
    read = wheel_reader(base.wheel())
    results = evaluate(load_series(), base.version, read)
    for result in results:
        assert not result.failed, (result.patch.name, result.outcome, result.detail)
        for path, text in result.files.items():
            if path.endswith(".py"):
                ast.parse(text, path)
            assert path in result.patch.adds or text != read(path)


@pytest.mark.parametrize("patch", load_series(), ids=lambda patch: patch.name)
def test_no_edit_of_the_series_matches_a_file_it_is_not_for(patch):
    read = wheel_reader(load_bases()["0.32.0"].wheel())
    for rule in (*patch.edits, *patch.regress):
        assert find(rule, read("vllm/sampling_params.py")) == []
        assert find(rule, b"") == []


def test_overlapping_matches_of_one_rule_are_refused_not_lost(tmp_path):
    nested = RULE.replace("matches: 1", "matches: 2")
    with pytest.raises(ForkError, match=r"a.yml#1 matches places of vllm/x.py that overlap"):
        _evaluate(tmp_path, nested, b"x = old(old(1))\n")
    # The matches lie apart, but what is cut with them does not.
    greedy = nested.replace("{pattern: old($A)}", "{kind: expression_statement, pattern: old($A)}").replace(
        "fix: new($A)", "fix: {template: new($A), expandEnd: {kind: expression_statement}}"
    )
    assert _evaluate(tmp_path, nested, b"old(1)\nold(2)\nb\n") == b"new(1)\nnew(2)\nb\n"
    with pytest.raises(ForkError, match="overlap"):
        _evaluate(tmp_path, greedy, b"old(1)\nold(2)\nb\n")


def test_a_rule_that_breaks_the_file_is_named_even_where_a_later_one_would_mend_it(tmp_path):
    breaks = RULE.replace("fix: new($A)", "fix: new($A")
    mends = RULE.replace("old($A)", "y").replace("fix: new($A)", "fix: z")
    with pytest.raises(ForkError, match=r"a.yml#2 leaves vllm/x.py broken: line 1"):
        _evaluate(tmp_path, f"{RULE.replace('new', 'old')}---\n{breaks}---\n{mends}", b"old(1)\ny\n")


def _evaluate(tmp_path: Path, rules: str, text: bytes) -> bytes:
    """What a patch with these rules makes of vllm/x.py."""
    folder = tmp_path / "patch"
    (folder / "edits").mkdir(parents=True, exist_ok=True)
    (folder / "edits" / "a.yml").write_text(rules)
    patch = dataclasses.replace(load_series()[-1], folder=folder, bases=SpecifierSet(), adds=())
    results = evaluate([patch], Version("1"), {"vllm/x.py": text}.get, locked=False)
    return changes(results)["vllm/x.py"]


TWO = b"""\
class A:
    def first(self):
        return 1

    def second(self):
        def inner():
            return 2
        return inner

    x = 3
"""


@pytest.mark.parametrize(
    ("match", "cut", "names"),
    [
        ("return 1", "return 1", {"A.first"}),
        ("return 2", "return 2", {"A.second.inner"}),
        ("return inner", "return inner", {"A.second"}),
        ("x = 3", "x = 3", {MODULE}),
        ("def second", "def first(self):\n        return 1\n\n    def second", {"A.first", "A.second"}),
        ("return inner", "return 2\n        return inner", {"A.second", "A.second.inner"}),
        ("x = 3", "return inner\n\n    x = 3", {"A.second"}),
        (TWO.decode(), TWO.decode(), {"A", "A.first", "A.second", "A.second.inner"}),
    ],
)
def test_the_lock_covers_every_definition_that_an_edit_touches_or_deletes(match, cut, names):
    start, cut_at = TWO.decode().index(match), TWO.decode().index(cut)
    found = touched(TWO, Match(start, start + len(match), (cut_at, cut_at + len(cut)), b""), TWO)
    assert set(found) == names
    if MODULE not in names:
        changed = touched(TWO, Match(start, start + len(match), (cut_at, cut_at + len(cut)), b""), b"")
        assert all(found[name] != changed[name] for name in names)


def test_the_region_of_a_name_defined_twice_is_both_definitions():
    text = b"def f(a): ...\ndef f(b):\n    return b\n"
    at = text.index(b"return b")
    (digest,) = touched(text, Match(at, at + 8, (at, at + 8), b""), text).values()
    assert digest == hashlib.sha256(text).hexdigest()
