"""The demo: it compares what it says, leaves no process behind, and its checkpoints show every stale tensor."""

import http.server
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from processes import running
from rich.console import Console
from safetensors.torch import load_file
from transformers import GptOssForCausalLM

from benchmarks import live_update, tiny_gpt_oss, vllm_server
from benchmarks.live_update import GENERATED_TOKENS, VOCABULARY, Answer, Outcome, check, compare
from benchmarks.vllm_server import Server, ServerError, last_meaningful_line, process_group, serve
from fork import ROOT
from fork.errors import ForkError
from fork.files import alone

NOWHERE = Server("stock on A", "http://127.0.0.1:9", Path("some.log"))


def an_answer(*tokens: int) -> Answer:
    """An answer to a prompt of three tokens, over a vocabulary of two."""
    return Answer(tokens, ({0: -1.0, 1: -2.0},) * 2, ({0: -1.0, 1: -2.0},) * len(tokens))


def changed(rows: tuple[dict[int, float], ...], position: int, value: float) -> tuple[dict[int, float], ...]:
    return (*rows[:position], rows[position] | {1: value}, *rows[position + 1 :])


class TestCompare:
    def test_equal_answers_have_no_difference(self):
        assert compare([an_answer(0, 1)], [an_answer(0, 1)]) == (0.0, True)

    @pytest.mark.parametrize("field", ["prompt_rows", "rows"])
    @pytest.mark.parametrize("position", [0, 1])
    def test_one_ulp_at_any_position_is_a_difference(self, field, position):
        one = an_answer(0, 1)
        value = math.nextafter(-2.0, 0.0)
        other = replace(one, **{field: changed(getattr(one, field), position, value)})
        assert compare([an_answer(1, 1), one], [an_answer(1, 1), other]) == (2.0 + value, True)

    def test_the_position_of_the_first_unequal_token_counts_and_later_ones_do_not(self):
        one = an_answer(0, 0, 0)
        two = replace(an_answer(0, 1, 0), rows=changed(changed(one.rows, 1, -2.5), 2, -9.0))
        assert compare([one], [two]) == (0.5, False)

    def test_an_unequal_token_alone_is_seen(self):
        assert compare([an_answer(0, 1)], [an_answer(0, 0)]) == (0.0, False)

    def test_a_missing_answer_is_refused(self):
        with pytest.raises(ValueError, match="argument 2 is longer"):
            compare([an_answer(0)], [an_answer(0), an_answer(0)])


ROW = dict.fromkeys(range(VOCABULARY), -1.0)
WHOLE = Answer((0,) * GENERATED_TOKENS, (ROW,) * 2, (ROW,) * GENERATED_TOKENS)


class TestCheck:
    def test_a_whole_answer_passes(self):
        check(WHOLE, 3, NOWHERE)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"prompt_rows": (ROW,)}, "got (1, 16, 16)"),
            ({"tokens": (0,)}, "got (2, 16, 1)"),
            ({"prompt_rows": (ROW, {0: -1.0})}, "got 1 values"),
            ({"prompt_rows": (ROW, ROW | {5: math.nan})}, "finite"),
            ({"rows": (*WHOLE.rows[1:], ROW | {5: -math.inf})}, "from -inf to -1.0"),
        ],
    )
    def test_what_could_not_show_as_a_difference_is_refused(self, change, says):
        with pytest.raises(ServerError) as refused:
            check(replace(WHOLE, **change), 3, NOWHERE)
        assert says in str(refused.value) and "some.log" in str(refused.value)


class TestVerdict:
    EXACT = Outcome(0.0, True, 0.1)
    OFF = Outcome(0.0, False, 0.1)
    NEAR = Outcome(1e-7, True, 0.1)

    @pytest.mark.parametrize(
        ("stock", "fork", "status"),
        [(OFF, EXACT, 0), (NEAR, EXACT, 0), (EXACT, EXACT, 1), (OFF, NEAR, 1), (NEAR, OFF, 1), (EXACT, OFF, 1)],
    )
    def test_only_an_exact_fork_beside_a_differing_stock_passes(self, stock, fork, status):
        assert live_update.verdict({"stock": stock, "fork": fork}) == status

    def test_the_report_replaces_the_file_and_leaves_no_draft(self, tmp_path):
        path = tmp_path / "demo.json"
        path.write_text("old")
        live_update.report({"stock": self.OFF, "fork": self.EXACT}, path, Console(quiet=True))
        assert json.loads(path.read_text()) == {
            "stock": {"max_abs_logprob_diff": 0.0, "tokens_equal": False, "update_seconds": 0.1},
            "fork": {"max_abs_logprob_diff": 0.0, "tokens_equal": True, "update_seconds": 0.1},
        }
        assert list(tmp_path.iterdir()) == [path]


class TestUsage:
    def test_a_stock_folder_without_vllm_is_refused_in_one_line(self, tmp_path, capsys):
        assert live_update.main(["--stock", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert not (tmp_path / "out").exists()

    def test_an_unknown_option_is_refused(self):
        with pytest.raises(SystemExit) as refused:
            live_update.main(["--fast"])
        assert refused.value.code == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoints A and B."""
    folder = tmp_path_factory.mktemp("demo")
    live_update.write_checkpoints(folder)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny matrices on several threads mostly wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class TestCheckpoints:
    def test_the_same_seed_gives_the_same_bytes(self, folder, tmp_path):
        live_update.write_checkpoints(tmp_path)
        for name in ("A", "B"):
            again = (tmp_path / name / "model.safetensors").read_bytes()
            assert again == (folder / name / "model.safetensors").read_bytes()

    def test_a_and_b_share_names_and_no_tensor(self, folder):
        a, b = (load_file(folder / name / "model.safetensors") for name in ("A", "B"))
        assert a.keys() == b.keys() and len(a) == 37
        for name in a:
            assert a[name].dtype == b[name].dtype == torch.bfloat16
            assert not (a[name] == b[name]).all(), name
            assert a[name].unique().numel() > 1, name

    def test_any_one_stale_tensor_or_expert_shows_in_the_answers(self, folder, one_thread):
        """Each tensor of B, and each expert alone, is set back to A: the real model must answer otherwise."""
        a, b = (GptOssForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("A", "B"))
        prompts = torch.tensor(tiny_gpt_oss.prompts())
        old = dict(a.named_parameters())
        with torch.no_grad():
            fresh = b(prompts).logits
            for name, parameter in b.named_parameters():
                whole = ".experts." not in name
                pairs = [(parameter, old[name])] if whole else zip(parameter, old[name], strict=True)
                for i, (new, stale) in enumerate(pairs):
                    kept = new.clone()
                    new.copy_(stale)
                    assert (b(prompts).logits - fresh).abs().max() > 0.01, f"{name} {i}"
                    new.copy_(kept)
            assert torch.equal(b(prompts).logits, fresh)


class TestLastMeaningfulLine:
    @pytest.mark.parametrize(
        ("log", "line"),
        [
            ("", "the log is empty"),
            ("starting\nkilled\n\n", "killed"),
            ("(APIServer pid=12) ERROR 01-02 03:04:05 [a.py:7] ValueError: no such\n  bye\n", "ValueError: no such"),
            (
                "\x1b[31m(Worker pid=1)\x1b[0m OSError: disk full\nRuntimeError: See root cause above.\n",
                "OSError: disk full",
            ),
            ("RuntimeError: failed. See root cause above.\n", "RuntimeError: failed. See root cause above."),
            ("ValidationError: 1 error\n  Value error, bad path\n    For more, see there\n", "Value error, bad path"),
        ],
    )
    def test_it_is_the_last_error_that_says_something(self, tmp_path, log, line):
        path = tmp_path / "log"
        path.write_text(log)
        assert last_meaningful_line(path) == line


def test_a_second_run_in_the_same_folder_is_refused_and_leaves_the_report_of_the_first(tmp_path):
    work, result = tmp_path / "demo", tmp_path / "demo.json"
    work.mkdir()
    result.write_text("{}")
    with alone(work), pytest.raises(ForkError, match="another run is at work on"):
        live_update.run(tmp_path / "stock", tmp_path)
    assert result.read_text() == "{}" and list(work.iterdir()) == []


class TestPost:
    @pytest.fixture
    def server(self) -> Iterator[Server]:
        """A real HTTP server that echoes, and refuses what it is told to refuse."""

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(500 if self.path == "/refuse" else 200)
                self.end_headers()
                self.wfile.write(b"not\njson" if self.path != "/echo" else body)

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as real:
            threading.Thread(target=real.serve_forever, daemon=True).start()
            yield Server("fork on B", f"http://127.0.0.1:{real.server_port}", Path("some.log"))
            real.shutdown()

    def test_it_gives_the_answer(self, server):
        assert server.post("/echo", {"a": [1]}) == {"a": [1]}

    @pytest.mark.parametrize(("path", "says"), [("/refuse", "status 500: not json"), ("/text", "no answer")])
    def test_any_other_answer_is_one_line_that_names_the_log(self, server, path, says):
        with pytest.raises(ServerError) as refused:
            server.post(path, {})
        message = str(refused.value)
        assert message.startswith(f"fork on B: POST {path} gave {says}") and message.endswith("log: some.log")
        assert "\n" not in message

    def test_no_server_is_one_line_too(self):
        with pytest.raises(ServerError, match=r"stock on A: POST /echo gave no answer: .*refused.*; log: some\.log"):
            NOWHERE.post("/echo", {})


#: A child and a grandchild that both ignore the polite signals and write their ids; then what the leader does.
STUBBORN = """
import os, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
pids = sys.argv[1]
grandchild = "import time; time.sleep(600)"
child = f"import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', {grandchild!r}]).pid, flush=True); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
text = f"{os.getpid()} {started.pid} {started.stdout.readline().decode()}"
open(pids + ".new", "w").write(text)
os.rename(pids + ".new", pids)
time.sleep(float(sys.argv[2]))
"""  # noqa: E501


def tree(folder: Path, leader_lives: float = 600) -> tuple[list[str], Path]:
    """A command that starts three stubborn processes, and the file in which their ids appear."""
    pids = folder / "pids"
    return [sys.executable, "-c", STUBBORN, str(pids), str(leader_lives)], pids


def wait_for(condition, seconds: float = 60):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def ids(pids: Path) -> list[int]:
    wait_for(pids.exists)
    found = [int(pid) for pid in pids.read_text().split()]
    assert len(found) == 3
    return found


class TestProcessGroup:
    @pytest.fixture(autouse=True)
    def _short_grace(self, monkeypatch):
        monkeypatch.setattr(vllm_server, "GRACE_SECONDS", 0.5)

    @pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt, SystemExit])
    def test_the_whole_tree_is_gone_however_the_block_ends(self, tmp_path, error):
        command, pids = tree(tmp_path)
        with suppress(error or ()), process_group(command, tmp_path / "log", dict(os.environ)):
            started = ids(pids)
            assert running(started) == started
            if error:
                raise error
        assert running(started) == []

    def test_children_of_a_leader_that_died_are_stopped(self, tmp_path):
        command, pids = tree(tmp_path, leader_lives=0)
        with process_group(command, tmp_path / "log", dict(os.environ)) as process:
            started = ids(pids)
            process.wait()
            assert running(started) == started[1:]
        assert running(started) == []

    def test_other_processes_are_left_alone(self, tmp_path):
        bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        try:
            command, pids = tree(tmp_path)
            with process_group(command, tmp_path / "log", dict(os.environ)):
                ids(pids)
            assert bystander.poll() is None
        finally:
            bystander.kill()
            bystander.wait()

    def test_a_program_that_is_missing_is_an_error_and_not_a_leak(self, tmp_path):
        with pytest.raises(FileNotFoundError), process_group(["/no/such/program"], tmp_path / "log", {}):
            raise AssertionError("unreachable")

    def test_a_second_interrupt_ends_the_grace_time(self, tmp_path):
        command, pids = tree(tmp_path)
        program = (
            "import os, sys, time\nfrom pathlib import Path\nfrom benchmarks import vllm_server\n"
            f"with vllm_server.process_group({command!r}, Path({str(tmp_path / 'log')!r}), dict(os.environ)):\n"
            "    time.sleep(600)\n"
        )
        main = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.DEVNULL)
        started = ids(pids)
        main.send_signal(signal.SIGINT)
        time.sleep(1)
        assert running(started) == started and main.poll() is None
        main.send_signal(signal.SIGINT)
        main.wait(timeout=vllm_server.GRACE_SECONDS + 5)
        assert running(started) == []


class TestRealServer:
    def test_a_server_that_dies_at_start_says_why_in_one_line(self, tmp_path):
        log = tmp_path / "logs" / "fork-A.log"
        with pytest.raises(ServerError) as refused, serve("fork on A", [str(tmp_path / "none")], log):
            raise AssertionError("unreachable")
        message = str(refused.value)
        assert message.startswith("fork on A: the server ended with status 1 before it was ready: ")
        assert str(tmp_path / "none") in message.partition("; log: ")[0]
        assert message.endswith(f"; log: {log}") and "\n" not in message

    @pytest.mark.parametrize(("number", "stage"), [(signal.SIGINT, "Starting to load model"), (signal.SIGTERM, "pid=")])
    def test_a_signal_stops_the_program_and_every_process_it_started(self, tmp_path, number, stage):
        """The installed vLLM stands in for the base too: a laid-out base is not needed to see servers stop."""
        installed = Path(str(find_spec("vllm").origin)).parents[1]
        command = [sys.executable, "-m", "benchmarks.live_update", "--stock", str(installed), "--out", str(tmp_path)]
        log = tmp_path / "demo" / "stock-A.log"
        program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for(lambda: log.exists() and stage in log.read_text(errors="replace"), 240)
            tree = [process.pid for process in psutil.Process(program.pid).children(recursive=True)]
            assert running(tree), "nothing to stop"
            program.send_signal(number)
            assert program.wait(timeout=60) == 128 + number
        finally:
            program.terminate()
        assert running(tree) == []
        assert not (tmp_path / "demo.json").exists()
        assert "write checkpoints A and B" in program.stdout.read()
        assert program.stderr.read() == "\nstopping the servers\n"
