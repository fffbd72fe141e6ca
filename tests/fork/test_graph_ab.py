"""The benchmark of recorded graphs: what it compares, and what it does not let pass."""

import json

import pytest

from benchmarks import graph_ab
from benchmarks.graph_ab import Row, first_diverging_token, row, verdict
from benchmarks.live_update import Answer
from fork import files
from fork.bases import find_base
from fork.errors import ForkError


def answer(*tokens: int, value: float = -1.0) -> Answer:
    return Answer(tokens, (), ({0: value, 1: -2.0},) * len(tokens))


def test_a_row_has_the_largest_difference_of_each_side_and_whether_all_tokens_agree():
    fresh = [answer(0, 1), answer(1, 1)]
    found = row(
        "mla",
        "before-kept",
        {"eager": fresh, "replay": [answer(0, 1), answer(1, 0, value=-1.5)]},
        {"eager": fresh, "replay": fresh},
    )
    assert found.json() == {
        "model": "mla",
        "case": "before-kept",
        "eager_max_abs_logprob_diff": 0.0,
        "replay_max_abs_logprob_diff": 0.5,
        "tokens_equal": False,
    }
    assert found.diverging == {"eager": None, "replay": 1}


def test_the_first_diverging_token_is_the_lowest_of_all_answers():
    fresh = [answer(0, 0, 0), answer(0, 0, 0)]
    assert first_diverging_token([answer(0, 0, 1), answer(0, 1, 1)], fresh) == 1
    assert first_diverging_token(fresh, fresh) is None


def made(case: str, eager: float, replay: float, at: int | None = None) -> Row:
    return Row("mla", case, {"eager": eager, "replay": replay}, {"eager": None, "replay": at})


GOOD = [made("before-poisoned", 0.0, 3.0, 1), made("before-kept", 0.0, 1.0), made("after-poisoned", 0.0, 0.0)]


@pytest.mark.parametrize(
    ("rows", "status", "said"),
    [
        (GOOD, 0, ""),
        ([made("before-kept", 1.0, 0.0)], 1, "nothing is shown"),
        ([made("after-poisoned", 0.0, 1e-9)], 1, "differs from a fresh engine"),
        ([made("after-poisoned", 1e-9, 0.0)], 1, "differs from a fresh engine"),
        ([made("fresh", 0.0, 0.0, at=3)], 1, "differs from a fresh engine"),
    ],
)
def test_the_exit_status_says_whether_the_fix_is_exact_and_the_fault_is_seen(rows, status, said, capsys):
    assert verdict(rows) == status
    assert said in capsys.readouterr().err


def test_the_fault_is_put_back_into_what_the_series_makes():
    """On 0.32.0 upstream has the cure for MLA, and the series brings that for sinks."""
    base = find_base("0.32.0")
    read = files.wheel_reader(base.wheel())
    mla = "vllm/model_executor/layers/attention/mla_attention.py"
    faulty = graph_ab.faulty(base, "cpu", "mla-post-load-storage")
    assert b"self.W_UV = W_UV.transpose(0, 1)" in faulty[mla] and b"self.W_UV = " not in read(mla)
    assert "vllm/model_executor/model_loader/attention_sink.py" in faulty
    assert "vllm/model_executor/model_loader/attention_sink.py" not in graph_ab.faulty(
        base, "cpu", "attention-sink-loader"
    )
    with pytest.raises(ForkError, match=r"mends nothing on 0\.33\.0"):
        graph_ab.faulty(find_base("0.33.0"), "cuda", "attention-sink-loader")


def test_an_engine_that_fails_is_one_line_that_names_its_log_and_leaves_no_report(tmp_path, monkeypatch, capsys):
    """The real engine program, on checkpoints that are none."""
    (tmp_path / "graph_ab.json").write_text("[]")
    monkeypatch.setattr(graph_ab, "MODELS", {"mla": (lambda *_: None, "mla-post-load-storage", {"cpu": "CPU_MLA"})})
    assert graph_ab.main(["--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    log = tmp_path / "graph_ab" / "mla" / "before-poisoned.log"
    assert error == f"before-poisoned: the engine ended with status 1; log: {log}\n"
    assert log.read_text() and not (tmp_path / "graph_ab.json").exists()


def test_answers_come_back_from_the_engine_process_as_they_were():
    given = [answer(1, 0)]
    plain = {"tokens": list(given[0].tokens), "prompt_rows": [], "rows": [dict(each) for each in given[0].rows]}
    assert [graph_ab._answer(json.loads(json.dumps(plain)))] == given
