# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Sinks in two processes over gloo: of one model a family, each rank loads, reloads
twice and finds its own heads.

Nothing tells a group its size or rank here; what stands in for hardware is what each
row's `prepare` names.
"""

import json
import time
import traceback
from pathlib import Path

import pytest
import torch.multiprocessing

from tests.models.attention_sink.rows import FAMILIES
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    init_distributed_environment,
)
from vllm.distributed.parallel_state import ensure_model_parallel_initialized

RANKS = 2
PATIENCE = 600.0


def load_each_family(rank: int, folder: Path) -> None:
    """What the process of `rank` does: writes how each family went, which is nothing
    where it went well.
    """
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            RANKS, rank, f"file://{folder}/rendezvous", rank, "gloo"
        )
        ensure_model_parallel_initialized(RANKS, 1)
    assert (
        get_tensor_model_parallel_world_size(),
        get_tensor_model_parallel_rank(),
    ) == (RANKS, rank)
    went = {}
    for family in FAMILIES:
        try:
            load(family, rank, folder / f"{family}-{rank}")
            went[family] = ""
        except Exception:
            went[family] = traceback.format_exc()
    (folder / f"rank-{rank}.json").write_text(json.dumps(went))


def load(family: str, rank: int, folder: Path) -> None:
    row = next((row for row in FAMILIES[family].values() if row.is_in_base()), None)
    if row is None:
        return
    with pytest.MonkeyPatch.context() as monkeypatch:
        config = row.configure(folder, monkeypatch, RANKS)
        model = row.build(config, monkeypatch)
        row.check_every_load(model, config, RANKS, rank)


@pytest.fixture(scope="module")
def went(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """How each family went on each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = torch.multiprocessing.spawn(
        load_each_family, (folder,), nprocs=RANKS, join=False
    )
    end = time.monotonic() + PATIENCE
    while not processes.join(max(0, end - time.monotonic())):
        if time.monotonic() > end:
            for process in processes.processes:
                process.kill()
            pytest.fail(f"the ranks did not end within {PATIENCE:.0f} s")
    return [
        json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)
    ]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("family", FAMILIES)
def test_each_rank_has_its_own_heads_after_every_load(
    went: list[dict[str, str]], family: str, rank: int
) -> None:
    if not any(row.is_in_base() for row in FAMILIES[family].values()):
        pytest.skip(f"this base has no {family}")
    assert not went[rank][family], went[rank][family]
