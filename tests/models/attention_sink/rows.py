# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Every model that has sinks, by family."""

from tests.models.attention_sink import (
    deepseek_v4,
    gpt_oss,
    granite,
    hy_v4,
    laguna,
    mimo_v2,
    qwen3_dflash,
    transformers_backend,
)
from tests.models.attention_sink.harness import Row

FAMILIES: dict[str, dict[str, Row]] = {
    "gpt-oss": gpt_oss.ROWS,
    "laguna": laguna.ROWS,
    "deepseek-v4": deepseek_v4.ROWS,
    "granite": granite.ROWS,
    "hy-v4": hy_v4.ROWS,
    "mimo-v2": mimo_v2.ROWS,
    "qwen3-dflash": qwen3_dflash.ROWS,
    "transformers": transformers_backend.ROWS,
}
ROWS = {name: row for rows in FAMILIES.values() for name, row in rows.items()}
