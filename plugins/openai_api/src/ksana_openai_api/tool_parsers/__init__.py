"""The formats in which models write tool calls, a family a file."""

from ksana_openai_api.tool_parsers import (
    deepseek,
    deepseek_v32,
    hermes,
    internlm,
    kimi_k2,
    llama_json,
    mistral,
    pythonic,
)

TOOL_PARSERS = tuple(
    call_format.info()
    for call_format in (
        deepseek.DEEPSEEK_V3,
        deepseek.DEEPSEEK_V31,
        deepseek_v32.DEEPSEEK_V32,
        hermes.HERMES,
        internlm.INTERNLM,
        kimi_k2.KIMI_K2,
        llama_json.LLAMA3_JSON,
        llama_json.LLAMA4_JSON,
        pythonic.LLAMA4_PYTHONIC,
        mistral.MISTRAL,
        pythonic.PYTHONIC,
    )
)
"""What the plugin registers."""

__all__ = ["TOOL_PARSERS"]
