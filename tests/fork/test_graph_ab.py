"""The benchmark of recorded graphs: what it compares, and what it does not let pass."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import running

from benchmarks import graph_ab, graphed_engine
from benchmarks.graph_ab import ROWS, Row, first_diverging_token, row, verdict, whole
from benchmarks.live_update import Answer
from benchmarks.tiny_gpt_oss import VOCABULARY
from fork import ROOT, files
from fork.bases import find_base
from fork.errors import ForkError

ONE_ROW = dict.fromkeys(range(VOCABULARY), -2.0)


def answer(*tokens: int, value: float = -1.0) -> Answer:
    return Answer(tokens, (), (ONE_ROW | {0: value},) * len(tokens))


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


GOOD = {
    "before-poisoned": made("before-poisoned", 0.0, 3.0, 1),
    "before-kept": made("before-kept", 0.0, 1.0),
    "after-poisoned": made("after-poisoned", 0.0, 0.0),
    "fresh": made("fresh", 0.0, 0.0),
}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (made("before-kept", 1.0, 0.0), "mla, before-kept: the replay does not differ, so nothing is shown"),
        (made("after-poisoned", 0.0, 1e-9), "mla, after-poisoned: differs from a fresh engine"),
        (made("after-poisoned", 1e-9, 0.0), "mla, after-poisoned: differs from a fresh engine"),
        (made("fresh", 0.0, 0.0, at=3), "mla, fresh: differs from a fresh engine"),
        (made("after-poisoned", 0.0, math.inf), "mla, after-poisoned: a log-probability is missing or not finite"),
    ],
)
def test_the_exit_status_says_whether_the_fix_is_exact_and_the_fault_is_seen(bad, says, capsys):
    assert verdict(list(GOOD.values()), ["mla"]) == 0
    assert capsys.readouterr().err == ""
    assert verdict(list((GOOD | {bad.case: bad}).values()), ["mla"]) == 1
    assert capsys.readouterr().err == f"{says}\n"


@pytest.mark.parametrize("case", ROWS)
def test_a_row_that_was_not_measured_is_no_success(case, capsys):
    assert verdict([each for each in GOOD.values() if each.case != case], ["mla"]) == 1
    assert capsys.readouterr().err == f"mla, {case}: was not measured\n"
    assert verdict(list(GOOD.values()), ["mla", "sinks"]) == 1
    assert verdict([], ["mla"]) == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf, None])
@pytest.mark.parametrize("case", ROWS)
def test_a_log_probability_that_is_no_number_or_missing_is_an_infinite_difference(case, value, capsys):
    """It counts as one that differs before the fix, and fails after it."""
    rows = ONE_ROW | {5: value}
    if value is None:
        del rows[5]
    bad, fresh = [answer(1, 0), Answer((1,), (), (rows,))], [answer(1, 0), answer(1)]
    assert whole(fresh) and not whole(bad)
    found = row("mla", case, {"eager": fresh, "replay": bad}, {"eager": fresh, "replay": fresh})
    assert found.differences == {"eager": 0.0, "replay": math.inf} and not found.exact
    assert '"replay_max_abs_logprob_diff": null' in json.dumps(found.json())
    assert verdict(list((GOOD | {case: found}).values()), ["mla"]) == (0 if case.startswith("before") else 1)
    assert case.startswith("before") or f"mla, {case}: a log-probability is" in capsys.readouterr().err


def test_the_fault_is_put_back_into_what_the_series_makes():
    """On 0.32.0 upstream has the cure for MLA, and the series brings that for sinks."""
    base = find_base("0.32.0")
    read = files.wheel_reader(base.wheel())
    mla = "vllm/model_executor/layers/attention/mla_attention.py"
    faulty = graph_ab.faulty_trees(base, "cpu")
    assert faulty.keys() == {"mla", "sinks"}
    assert b"self.W_UV = W_UV.transpose(0, 1)" in faulty["mla"][mla] and b"self.W_UV = " not in read(mla)
    assert "vllm/model_executor/model_loader/attention_sink.py" in faulty["mla"]
    assert "vllm/model_executor/model_loader/attention_sink.py" not in faulty["sinks"]


@pytest.mark.parametrize(
    ("base", "models", "says"),
    [
        ("0.33.0", {"mla", "flashinfer"}, "sinks: left out, as attention-sink-loader mends nothing on 0.33.0\n"),
        ("0.25.1", {"mla", "sinks"}, "flashinfer: left out, as FlashInfer on 0.25.1 takes no sinks on this GPU\n"),
    ],
)
def test_a_model_whose_fault_cannot_be_shown_on_a_base_is_left_out_by_name(base, models, says, capsys):
    assert graph_ab.faulty_trees(find_base(base), "cuda").keys() == models
    assert capsys.readouterr().out == says


def test_no_model_left_is_an_error(monkeypatch):
    monkeypatch.setattr(graph_ab, "MODELS", {"sinks": graph_ab.MODELS["sinks"]})
    with pytest.raises(ForkError, match=r"no model shows a fault on 0\.33\.0 \(cuda\)"):
        graph_ab.faulty_trees(find_base("0.33.0"), "cuda")


ONE_MODEL = {"mla": (lambda *_: None, "mla-post-load-storage", {"cpu": "CPU_MLA"})}


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the report of an earlier run, for runs on the CPU and with one model that has no checkpoints."""
    (tmp_path / "graph_ab.json").write_text("[]")
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    monkeypatch.setattr(graph_ab, "MODELS", ONE_MODEL)
    return tmp_path


def test_an_engine_that_fails_is_one_line_that_names_its_log_and_leaves_no_report(out, capsys):
    """The real engine program, on checkpoints that are none."""
    assert graph_ab.main(["--out", str(out)]) == 1
    log = out / "graph_ab" / "mla" / "reference.log"
    assert capsys.readouterr().err == f"mla, reference: the engine ended with status 1; log: {log}\n"
    assert log.read_text() and not (out / "graph_ab.json").exists()


@pytest.mark.parametrize(("name", "value"), [("VLLM_FORK_BASE", "0.0.1"), ("VLLM_TARGET_DEVICE", "tpu")])
def test_a_wrong_base_or_device_leaves_no_report(out, monkeypatch, capsys, name, value):
    monkeypatch.setenv(name, value)
    assert graph_ab.main(["--out", str(out)]) == 1
    assert value in capsys.readouterr().err
    assert not (out / "graph_ab.json").exists()


def test_a_second_run_in_the_same_folder_is_refused_and_leaves_the_report_of_the_first(out, capsys):
    (out / "graph_ab").mkdir()
    with files.alone(out / "graph_ab"):
        assert graph_ab.main(["--out", str(out)]) == 1
    assert "another run is at work on" in capsys.readouterr().err
    assert (out / "graph_ab.json").read_text() == "[]" and list((out / "graph_ab").iterdir()) == []


def test_a_report_that_cannot_be_written_is_one_line(out, monkeypatch, capsys):
    """No engine is started: what one would answer is given."""
    monkeypatch.setattr(graph_ab, "faulty_trees", lambda *_: {"mla": {}})
    monkeypatch.setattr(graph_ab, "measure", lambda *_: GOOD.values())
    (out / "graph_ab.tmp").mkdir()
    assert graph_ab.main(["--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert str(out / "graph_ab.tmp") in error and error.count("\n") == 1
    (out / "graph_ab.tmp").rmdir()
    assert graph_ab.main(["--out", str(out)]) == 0
    assert [each["case"] for each in json.loads((out / "graph_ab.json").read_text())] == list(ROWS)


#: Stands for Python, and so for an engine: it writes the ids of itself and a child beside its log, and does not end.
ENDLESS = """#!{python}
import os, subprocess, sys, time
from pathlib import Path
pids = Path(sys.argv[-1]).with_name("pids")
pids.with_suffix(".new").write_text(f"{{os.getpid()}} {{subprocess.Popen(['sleep', '600']).pid}}")
pids.with_suffix(".new").rename(pids)
time.sleep(600)
"""
PROGRAM = """
import sys
from benchmarks import graph_ab
out, engine, graph_ab.SECONDS = sys.argv[1], sys.argv[2], float(sys.argv[3])
def write(*_):
    sys.executable = engine
graph_ab.MODELS = {"mla": (write, "mla-post-load-storage", {"cpu": "CPU_MLA"})}
sys.exit(graph_ab.main(["--out", out]))
"""


@pytest.mark.parametrize(
    ("number", "seconds", "status"), [(signal.SIGTERM, 600, 143), (signal.SIGINT, 600, 130), (None, 10, 1)]
)
def test_no_engine_is_left_by_a_signal_or_a_timeout(out, number, seconds, status):
    engine, pids = out / "python", out / "graph_ab" / "mla" / "pids"
    engine.write_text(ENDLESS.format(python=sys.executable))
    engine.chmod(0o755)
    command = [sys.executable, "-c", PROGRAM, str(out), str(engine), str(seconds)]
    program = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not pids.exists():
            assert program.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        started = [int(pid) for pid in pids.read_text().split()]
        if number:
            assert running(started) == started
            program.send_signal(number)
        assert program.wait(timeout=60) == status
    finally:
        program.kill()
    assert running(started) == []
    log = out / "graph_ab" / "mla" / "reference.log"
    said = "" if number else f"mla, reference: the engine took more than 10 s; log: {log}\n"
    assert program.stderr.read() == said
    assert not (out / "graph_ab.json").exists()
    assert {path.name for path in log.parent.iterdir()} == {"pids", "reference.log"}, "the faulty tree is left"


def test_signals_are_handled_as_before_after_a_run(out, monkeypatch):
    monkeypatch.setattr(graph_ab, "run", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(SystemExit):
        graph_ab.main(["--out", str(out)])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_replays_are_counted_from_the_call_on():
    class Graph:
        def replay(self) -> str:
            return "replayed"

    graph = Graph()
    graph.replay()
    count = graphed_engine.count_replays(Graph)
    assert count() == 0
    assert graph.replay() == Graph().replay() == "replayed"
    assert count() == 2


def engine_with(runner: object) -> SimpleNamespace:
    """An `LLM` with that model runner."""
    worker = SimpleNamespace(model_runner=runner)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


@pytest.mark.parametrize("kind", ["manager", "dispatcher"])
def test_captured_graphs_are_counted_and_turned_off(kind):
    """In a process of its own: importing vLLM needs one where nothing has imported what it imports in another order."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        processes.submit({"manager": _captured_by_a_manager, "dispatcher": _captured_by_a_dispatcher}[kind]).result()


def _captured_by_a_manager():
    """The model runner that users get: its manager, dispatching one graph that it need not run (that needs a GPU)."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    graph = cudagraph_utils.BatchExecutionDescriptor(CUDAGraphMode.FULL, 1, 1, 1)
    manager = object.__new__(cudagraph_utils.CudaGraphManager)
    vars(manager).update(graphs={graph: None}, _graphs_captured=True, _candidates={(1, 0): [graph]})
    vars(manager).update(_lora_dispatch_map={}, _max_lora_case=0)
    graphs = graphed_engine.Captured(engine_with(SimpleNamespace(cudagraph_manager=manager)))
    assert graphs.count() == 1 and manager.dispatch(1, 1, 1, 0) == graph
    graphs.turn_off()
    assert graphs.count() == 1 and manager.dispatch(1, 1, 1, 0).cg_mode == CUDAGraphMode.NONE


def _captured_by_a_dispatcher():
    """The older model runner: its dispatcher, with one graph that it need not run."""
    from vllm.config import CompilationConfig, CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    options = graphed_engine.Captured.options["compilation_config"]
    config = SimpleNamespace(
        compilation_config=CompilationConfig(**options, max_cudagraph_capture_size=1),
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        num_speculative_tokens=0,
        lora_config=None,
    )
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
    model = SimpleNamespace(concrete_cudagraph_entries={"one token": None})
    runner = SimpleNamespace(model=model, cudagraph_dispatcher=dispatcher)
    graphs = graphed_engine.Captured(engine_with(runner))
    assert graphs.count() == 1 and dispatcher.dispatch(1, uniform_decode=True)[0] == CUDAGraphMode.FULL
    graphs.turn_off()
    assert graphs.count() == 1 and dispatcher.dispatch(1, uniform_decode=True)[0] == CUDAGraphMode.NONE


def test_answers_come_back_from_the_engine_process_as_they_were():
    given = [answer(1, 0)]
    plain = {"tokens": list(given[0].tokens), "prompt_rows": [], "rows": [dict(each) for each in given[0].rows]}
    assert [graph_ab._answer(json.loads(json.dumps(plain)))] == given
