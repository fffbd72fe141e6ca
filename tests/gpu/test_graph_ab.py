"""Captured CUDA graphs through the engine's own sleep and a weight update; needs one GPU and the fork's CUDA wheel.

Five engines for each of three models, but for those whose fault cannot be shown on the base: MLA with a block-wise fp8
kv_b_proj, sinks in the Triton backend, and sinks in FlashInfer. It needs the base's CUDA wheel in the cache, from which
the trees with the old faults are made (`python -m fork bases --fetch 0.32.0 --device cuda`), and nvcc, as FlashInfer
compiles its kernels at the first start.
"""

import json

import pytest
import torch

from benchmarks import graph_ab

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_captured_graphs_serve_the_new_weights_with_the_fixes_and_not_without(tmp_path):
    assert graph_ab.main(["--out", str(tmp_path)]) == 0
    rows = {(row["model"], row["case"]): row for row in json.loads((tmp_path / "graph_ab.json").read_text())}
    assert {model for model, _ in rows} <= {"mla", "sinks", "flashinfer"}
    for (model, case), row in rows.items():
        assert (row["replay_max_abs_logprob_diff"] == 0.0) is not case.startswith("before"), (model, case)
