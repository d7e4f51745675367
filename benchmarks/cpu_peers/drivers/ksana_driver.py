"""Ksana, offline."""

from __future__ import annotations

from typing import Any

from protocol import Generate, serve

from ksana import LLM, SamplingParams


def load(settings: dict[str, Any]) -> Generate:
    llm = LLM(settings["model"], **settings["options"])

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        return [list(output.token_ids) for output in llm.generate(prompts, sampling)]

    return generate


if __name__ == "__main__":
    serve(load)
