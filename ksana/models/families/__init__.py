"""Families of models, by the keys of their ``config.json``: one module each.

A family says which keys it has, what the absence of one means, and what they amount to. Defaults are those of the
Hugging Face class, since a ``config.json`` may leave out what equals them.
"""

from __future__ import annotations

from ksana.models.families.base import DecoderFields
from ksana.models.families.gemma import Gemma2Fields, Gemma3Fields
from ksana.models.families.llama import LlamaFields
from ksana.models.families.mistral import MistralFields
from ksana.models.families.qwen import Qwen2Fields, Qwen3Fields

ARCHITECTURES: dict[str, type[DecoderFields]] = {
    "LlamaForCausalLM": LlamaFields,
    "MistralForCausalLM": MistralFields,
    "Qwen2ForCausalLM": Qwen2Fields,
    "Qwen3ForCausalLM": Qwen3Fields,
    "Gemma2ForCausalLM": Gemma2Fields,
    "Gemma3ForCausalLM": Gemma3Fields,
    "Gemma3ForConditionalGeneration": Gemma3Fields,
}
