"""The four shapes of ``prompt`` and ``input``."""

from __future__ import annotations

from typing import Any

from ksana.errors import RequestError


def parse_prompts(prompt: object, max_prompts: int, param: str = "prompt") -> list[str | list[int]]:
    """Tell the four shapes apart: text, texts, token ids, lists of token ids.

    Args:
        max_prompts: most prompts that the engine's queue takes at once.
        param: what errors call the field.

    Raises:
        RequestError: it has none of them, or holds too many; ``param`` names the first element that is wrong.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError(f"{param} must be a string, a list of strings, token ids or a list of them", param=param)
    if not prompt:
        raise RequestError(f"{param} must not be empty", param=param)
    if isinstance(prompt[0], int):
        return [_check_token_ids(prompt, param)]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"{param} holds {len(prompt)} prompts, more than the {max_prompts} that this server takes at once; "
            "send them in several calls",
            param=param,
        )
    return [_check_prompt(item, f"{param}[{index}]") for index, item in enumerate(prompt)]


def _check_prompt(prompt: object, param: str) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        return _check_token_ids(prompt, param)
    raise RequestError(f"{param} must be a string or a list of token ids", param=param)


def _check_token_ids(token_ids: list[Any], param: str) -> list[int]:
    for index, token_id in enumerate(token_ids):
        if type(token_id) is not int:
            raise RequestError(f"{param}[{index}] must be a token id, an integer", param=f"{param}[{index}]")
    return token_ids
