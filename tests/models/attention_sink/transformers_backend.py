# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A model of the Transformers library with sinks, through the backend that takes any of
its models.
"""

from tests.models.attention_sink.gpt_oss import GPT_OSS
from tests.models.attention_sink.harness import Row

CHOSEN = GPT_OSS | {"architectures": ["TransformersMoEForCausalLM"]}
NAMES = ("model.layers.{}.self_attn.sinks",) * 2

ROWS = {
    "transformers-gpt-oss": Row(
        CHOSEN, *NAMES, "vllm.model_executor.models.transformers.fusers.attention"
    )
}
