"""Writes the bytes of every sink of every model, as JSON, after a load and after a reload with other values.

Run `python tests/fork/sink_bytes.py FILE [ROW...]` with a vLLM tree and this repository in PYTHONPATH; the rows and the
ranks are those of tests/models/attention_sink.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

from tests.models.attention_sink.harness import RANKS, Row, layerwise, one_process, stand_for
from tests.models.attention_sink.rows import ROWS


def of_rank(row: Row, size: int, rank: int) -> list[dict[str, str]]:
    """Dtype and bytes of each sink by its parameter's name, after each of the two loads."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        stand_for(size, rank, monkeypatch)
        config = row.configure(Path(folder), monkeypatch, size)
        model = row.build(config, monkeypatch)
        model.load_weights(row.checkpoint(1))
        loaded = of_model(row, model)
        layerwise(model, config, lambda: model.load_weights(row.checkpoint(2)))
        return [loaded, of_model(row, model)]


def of_model(row: Row, model: nn.Module) -> dict[str, str]:
    return {
        name: f"{parameter.dtype} {bytes(parameter.data.view(torch.uint8).tolist()).hex()}"
        for name, parameter in row.sinks(model).items()
    }


def main(file: str, *names: str) -> None:
    with one_process():
        found = {
            name: {f"{rank} of {size}": of_rank(ROWS[name], size, rank) for size, rank in RANKS}
            for name in names or ROWS
            if ROWS[name].is_in_base()
        }
    Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
