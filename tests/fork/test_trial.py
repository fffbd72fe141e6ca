"""The trial verb is only worth its red: a patch whose test does not need it must be found out."""

import pytest
from support import run_fork

from fork.bases import find_base
from fork.files import wheel_reader

PATCH = "cpu-moe-prepack-reload"
TEST = "tests/model_executor/layers/test_cpu_moe_prepack_reload.py"
TARGET = "vllm/model_executor/layers/fused_moe/unquantized_fused_moe_method.py"


@pytest.fixture
def trial(repo, tmp_path):
    """Run the trial of one patch whose test file has these lines."""

    def run(lines: str, *args: str):
        (repo / TEST).write_text(lines)
        done = run_fork(repo, "trial", PATCH, "--base", "0.32.0", "--json", *args)
        (row,) = done.json
        return done.status, row["passed"], row["failed"], row["verdict"]

    return run


def test_a_test_that_needs_its_patch_passes_with_it_and_goes_red_without(trial):
    stock = wheel_reader(find_base("0.32.0").wheel())(TARGET)
    lines = (
        "import importlib.util, pathlib\n"
        "def test_it():\n"
        "    place = pathlib.Path(importlib.util.find_spec('vllm').origin).parent.parent\n"
        f"    assert len((place / {TARGET!r}).read_bytes()) != {len(stock)}\n"
    )
    assert trial(lines) == (0, 1, 0, "as it must")
    assert trial(lines, "--drop") == (0, 0, 1, "as it must")


def test_a_test_that_passes_without_its_patch_is_found_out(trial):
    assert trial("def test_it():\n    assert True\n", "--drop") == (1, 1, 0, "WRONG")


@pytest.mark.parametrize("lines", ["def test_it():\n    assert False\n", "import nothing_of_this_name\n", "x = 1\n"])
def test_a_test_that_fails_does_not_load_or_is_not_there_is_not_green(trial, lines):
    status, _, _, verdict = trial(lines)
    assert (status, verdict) == (1, "WRONG")
