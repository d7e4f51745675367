"""The ways in which models mark their reasoning."""

from ksana_openai_api.reasoning_parsers.think_tags import DEEPSEEK_R1, DEEPSEEK_V3, QWEN3

REASONING_PARSERS = (DEEPSEEK_R1, DEEPSEEK_V3, QWEN3)
"""What the plugin registers."""

__all__ = ["REASONING_PARSERS"]
