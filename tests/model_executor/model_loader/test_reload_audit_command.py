# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""`vllm reload-audit` says in one line what it cannot do, and keeps what it found."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
import pytest

from vllm.entrypoints.cli.reload_audit import add_arguments
from vllm.model_executor.model_loader.reload import zoo
from vllm.model_executor.model_loader.reload.audit_command import groups, main
from vllm.model_executor.model_loader.reload.audit_jobs import Job
from vllm.model_executor.model_loader.reload.audit_jobs import run as run_jobs
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(
    not current_platform.is_cpu(), reason="on a GPU, real checkpoints are audited"
)

LLAMA, QWEN = "LlamaForCausalLM", "Qwen3ForCausalLM"


def run(*words: str | Path) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return main(parser.parse_args([str(word) for word in words]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of Llama, and one of Qwen3."""
    folder = tmp_path_factory.mktemp("checkpoints")
    zoo.tiny(LLAMA).write(folder / "A", 1)
    zoo.tiny(LLAMA).write(folder / "B", 2)
    zoo.tiny(QWEN).write(folder / "other", 1)
    return folder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name architectures, or --all, or --model and --update"),
        ([LLAMA, "--all"], "name architectures, or --all, or --model and --update"),
        (
            ["LamaForCausalLM"],
            "unknown architecture LamaForCausalLM; near it: " + LLAMA,
        ),
        ([LLAMA, "--mode", "sam"], "unknown mode sam; one of same, update, back"),
        (["--all", "--group", "text"], "unknown group text; one of text-generation,"),
        ([LLAMA, "--group", "drafter"], "--group chooses from --all"),
        (["--model", "A"], "--model and --update go together"),
        ([LLAMA, "--tp", "0"], "--tp and --jobs are at least 1"),
        ([LLAMA, "--json", "no/such/file"], "no/such/file: No such file or directory"),
        (["--model", "a", "--update", "b"], "a/config.json: No such file or directory"),
    ],
)
def test_bad_usage_is_one_line(words, says, capsys) -> None:
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vllm reload-audit: {says}")


def broken(folder: Path, how: str) -> None:
    file = folder / "model.safetensors"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "missing":
        index = {"weight_map": {"a": "model-1.safetensors", "b": file.name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "none":
        file.unlink()
    else:
        (folder / "config.json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("truncated", "model.safetensors cannot be read: "),
        ("missing", "model-1.safetensors is missing"),
        ("none", " holds no safetensors"),
        ("nameless", "config.json names no architecture"),
    ],
)
def test_a_checkpoint_that_cannot_be_read_is_one_line(
    how, says, folder, tmp_path, capsys
) -> None:
    zoo.tiny(LLAMA).write(tmp_path / "B", 2)
    broken(tmp_path / "B", how)
    capsys.readouterr()
    assert run("--model", folder / "A", "--update", tmp_path / "B") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_checkpoint_of_another_architecture_is_one_line(folder, capsys) -> None:
    assert run("--model", folder / "A", "--update", folder / "other") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"is a checkpoint of {QWEN}, and" in line


def test_real_checkpoints_are_audited_and_reported(folder, tmp_path, capsys) -> None:
    files = tmp_path / "audit.json", tmp_path / "audit.html"
    words = ["--model", folder / "A", "--update", folder / "B", "--poison"]
    assert run(*words, "--json", files[0], "--html", files[1]) == 0
    rows = json.loads(files[0].read_text())
    assert [(row["mode"], row["verdict"]) for row in rows] == [
        ("update", "equal"),
        ("poisoned", "equal"),
    ]
    assert all(row["tensors"] > 20 and row["graph"] == 0.0 for row in rows)
    assert LLAMA in files[1].read_text() and "2 equal" in capsys.readouterr().out


def test_every_architecture_of_the_registry_has_a_group() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS, ModelRegistry

    assert set(groups()) == set(_VLLM_MODELS)
    assert set(groups()) <= set(ModelRegistry.get_supported_archs())


def test_it_is_a_subcommand_of_vllm() -> None:
    program = "from vllm.entrypoints.cli.main import main; main()"
    words = ["reload-audit", "LamaForCausalLM"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True
    )
    if "No module named" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 2
    assert "unknown architecture LamaForCausalLM" in done.stderr.splitlines()[-1]


#: The subcommand without the others, which import more than a release's CPU build has.
PROGRAM = """
import argparse, sys
from vllm.entrypoints.cli.reload_audit import add_arguments
from vllm.model_executor.model_loader.reload.audit_command import main
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(main(parser.parse_args()))
"""


def test_an_interrupt_keeps_the_verdicts_and_leaves_no_process(tmp_path) -> None:
    file = tmp_path / "audit.json"
    words = [LLAMA, QWEN, "--jobs", "1", "--json", str(file)]
    running = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stderr=subprocess.PIPE, text=True
    )
    try:
        while not file.exists() or LLAMA not in file.read_text():
            assert running.poll() is None
            time.sleep(0.2)
        below = psutil.Process(running.pid).children(recursive=True)
        running.send_signal(signal.SIGINT)
        errors = running.communicate(timeout=60)[1]
    finally:
        running.kill()
    assert running.returncode == 130
    assert "interrupted, 1 verdict kept" in errors
    assert [row["architecture"] for row in json.loads(file.read_text())] == [LLAMA]
    assert below and not psutil.wait_procs(below, timeout=30)[1]


def test_a_process_that_dies_costs_its_architecture_alone() -> None:
    known = set(psutil.Process().children())

    def kill_the_first() -> None:
        started: list[psutil.Process] = []
        while not started:
            time.sleep(0.5)
            started = [
                child
                for child in psutil.Process().children()
                if child not in known and "spawn_main" in " ".join(child.cmdline())
            ]
        started[0].kill()

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    jobs = [Job(LLAMA, ("update",)), Job(QWEN, ("update",))]
    (first, lost), (_, audited) = run_jobs(jobs, 1)
    killer.join()
    assert first.architecture == LLAMA
    assert [row.verdict for row in lost] == ["error"]
    assert lost[0].reason == "its process was ended by SIGKILL"
    assert [row.verdict for row in audited] == ["equal"], audited
