"""The check-writes verb: what it finds on real bases, stock and with the series."""

import ast
import re
from functools import cache

import pytest
from marked import MODELS, rows
from support import run_fork

from fork import ROOT, check_writes
from fork.bases import find_base
from fork.check_writes import MORE, check, python_files
from fork.errors import ForkError
from fork.series import load_series
from fork.writes.frames import Write

BASES = ("0.32.0", "0.31.0", "0.33.0", "0.25.1")

V4, V41, HY = (f"vllm/models/{each}/" for each in ("deepseek_v4", "deepseek_v41", "hy_v4"))

#: Every place of stock 0.32.0 that writes an attention sink past its loader: file and function.
SINKS = {
    *((f"{V4}{each}/model.py", "DeepseekV4Model.load_weights") for each in ("cpu", "xpu", "amd", "nvidia")),
    *((f"{V4}{each}/mtp.py", "DeepSeekV4MTP.load_weights") for each in ("xpu", "amd", "nvidia")),
    *((f"{V4}{each}/dspark.py", "DSparkDeepseekV4ForCausalLM.load_weights") for each in ("xpu", "amd", "nvidia")),
    *((f"{V41}{each}/model.py", "DeepseekV4Model.load_weights") for each in ("amd", "nvidia")),
    *((f"{V41}{each}/dspark.py", "DSparkDeepseekV4ForCausalLM.load_weights") for each in ("amd", "nvidia")),
    *((f"{HY}{each}/model.py", "HYV4Model.load_weights") for each in ("amd", "nvidia")),
    (f"{HY}nvidia/mtp.py", "HYV4MTP.load_weights"),
    (f"{MODELS}mimo_v2.py", "MiMoV2Model.load_weights"),
    *((f"{MODELS}gpt_oss.py", f"GptOssModel._load_weights_{each}") for each in ("mxfp4", "quark", "other")),
}

#: Other places of stock 0.32.0: file, function, parameter.
OTHERS = {
    *(("gpt_oss.py", "GptOssModel._load_weights_other", each) for each in (".w13_weight", ".w2_weight")),
    *(("gpt_oss.py", "GptOssModel._load_weights_other", each) for each in (".w13_bias", ".w2_bias")),
    *(("gpt_oss.py", "GptOssModel._load_weights_quark", f"{each} & fp8") for each in (".w13_weight", ".w2_weight")),
    ("gpt_oss.py", "GptOssModel._load_weights_quark", "input_scale|mlp.experts"),
    ("gpt_oss.py", "GptOssModel._load_weights_quark", ".w13_bias|.w2_bias"),
    ("step3_text.py", "Step3TextModel.load_weights", ".qkv_proj"),
    ("longcat_flash_ngram.py", "NgramEmbedding.load_weight", "self.oe_embedder.weight"),
    ("longcat_flash_ngram.py", "NgramEmbedding.load_weight", "self.oe_projection"),
    ("colbert.py", "ColBERTMixin._load_colbert_weights", "self.colbert_linear.weight"),
    ("bert.py", "BertForMaskedLM.load_weights", "self.mlm_head.decoder.weight"),
    ("llama_eagle3.py", "Eagle3LlamaForCausalLM.load_weights", "self.mask_hidden"),
    ("qwen3_eagle3.py", "Eagle3Qwen3ForCausalLM.load_weights", "self.mask_hidden"),
    ("cohere_asr.py", "CohereASRModel.load_weights", "pos_bias"),
    ("medusa.py", "Medusa.load_weights", "self.token_map"),
    *(("inkling/amd/moe.py", "InklingSinkExperts.load_weight", f"self.{each}_weight") for each in ("w13", "w2")),
    *(("inkling/nvidia/moe.py", "InklingSinkExperts.load_weight", f"self.{each}_weight") for each in ("w13", "w2")),
    *((f"inkling/{each}/moe.py", "InklingMoE.load_expert_weight", "w13") for each in ("amd", "nvidia")),
    *(
        (f"deepseek_v4/{each}/model.py", "DeepseekV4MegaMoEExperts.finalize_weights", "self.w13_weight")
        for each in ("xpu", "nvidia")
    ),
}


@cache
def _found(base: str, series: bool) -> list[Write]:
    found = find_base(base)
    writes = check(*python_files(found, found.wheel(), load_series() if series else [], check_writes.MODELS))
    return [write for write in writes if write.how not in MORE]


@cache
def _stock(base: str) -> tuple[list[str], dict[str, str]]:
    found = find_base(base)
    paths, read = python_files(found, found.wheel(), [], check_writes.MODELS)
    return paths, {path: (read(path) or b"").decode() for path in paths}


def test_every_sink_of_stock_0_32_is_listed_and_nothing_else_as_one():
    sinks = {(write.file, write.function) for write in _found("0.32.0", False) if "sink" in write.parameter}
    assert sinks == SINKS


def test_the_other_known_places_of_stock_0_32_are_listed():
    found = _found("0.32.0", False)
    assert {(re.sub(r"^vllm/(model_executor/)?models/", "", w.file), w.function, w.parameter) for w in found} >= OTHERS


def test_the_experts_of_flint_are_listed_on_0_33():
    flint = [write for write in _found("0.33.0", False) if write.file.startswith("vllm/models/flint/")]
    assert [(write.function, write.parameter) for write in flint] == [
        ("FlintNvfp4Experts.load_weights", "param_name")
    ] * 3


@pytest.mark.parametrize("base", BASES)
def test_a_line_of_load_weights_that_plainly_copies_into_a_parameter_is_listed(base):
    """Plainly: by the text of the line, which finds far less than the data flow but in another way."""
    plain = re.compile(r"(\bparams_dict\[|\bparam\.|\bparam\b\[).*\bcopy_\(|\bparam\.copy_\(")
    listed = {(write.file, write.line) for write in _found(base, False)}
    missed, seen = [], 0
    for path, text in _stock(base)[1].items():
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)) if "load_weights" in text else ():
            if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("load_weights"):
                for number in range(node.lineno, (node.end_lineno or 0) + 1):
                    if plain.search(lines[number - 1]):
                        seen += 1
                        missed += [] if (path, number) in listed else [f"{path}:{number}"]
    assert not missed and seen > 5


@pytest.mark.parametrize("base", BASES)
def test_nothing_in_a_weight_loader_is_listed(base):
    inside = [write for write in _found(base, False) if "weight_loader" in write.function]
    assert inside == []


def test_a_model_that_slices_but_then_calls_the_loader_is_not_listed():
    files = {write.file for write in _found("0.32.0", False)}
    assert not files & {MODELS + "laguna.py", MODELS + "qwen3_dflash.py", MODELS + "mimo_v2_mtp.py"}


@pytest.mark.parametrize("base", BASES)
def test_with_the_series_no_sink_is_written_past_its_loader(base):
    assert [write for write in _found(base, True) if "sink" in write.parameter] == []


@pytest.mark.parametrize("base", BASES)
def test_the_series_takes_rows_away_and_brings_none(base):
    """Compared without line numbers, which edits move."""
    before, after = (
        [(w.file, w.function, w.parameter, w.how) for w in _found(base, series)] for series in (False, True)
    )
    assert not {row for row in after if after.count(row) > before.count(row)}


def test_the_verb_prints_every_row_sorted_and_the_same_each_time():
    done = [
        run_fork(ROOT, "check-writes", "--base", "0.25.1", "--stock", "--json", PYTHONHASHSEED=seed)
        for seed in ("1", "2")
    ]
    assert (done[0].status, done[0].err) == (0, "") and done[0].out == done[1].out
    wanted = [
        {"file": w.file, "line": w.line, "function": w.function, "parameter": w.parameter, "write": w.how}
        for w in _found("0.25.1", False)
    ]
    assert done[0].json == wanted == sorted(wanted, key=lambda row: (row["file"], row["line"]))


def test_a_patch_that_is_dropped_brings_its_rows_back(fork):
    series = fork("check-writes", "--base", "0.25.1", "--json", "--drop", "gpt-oss-expert-reload").json
    experts = [row for row in series if row["function"] == "GptOssModel._load_weights_other"]
    assert experts and not [write for write in _found("0.25.1", True) if write.function == experts[0]["function"]]
    fork("check-writes", "--drop", "nothing").refuses("unknown patch 'nothing'", status=2)


def test_people_get_a_table_and_more_kinds_where_they_ask_for_them(fork):
    done = fork("check-writes", "--base", "0.25.1", "--stock", "--also", "sender", "--also", "direct-loader")
    assert done.status == 0 and "sender" in done.out and "direct-loader" in done.out
    assert fork("check-writes", "--also", "all").status == 2


def test_a_file_that_this_python_cannot_read_is_named():
    with pytest.raises(ForkError, match=r"models/model.py: line 2: .*newer Python"):
        rows({MODELS + "model.py": "class Model:\n    def load_weights(self weights): pass\n"})
