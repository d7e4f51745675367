"""vLLM, offline, compiled, its engine in this process: the fastest of its variants on few cores."""

from __future__ import annotations

from typing import Any

from protocol import Generate, serve


def load(settings: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    llm = LLM(
        settings["model"],
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        batch = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(output.outputs[0].token_ids) for output in llm.generate(batch, sampling, use_tqdm=False)]

    return generate


if __name__ == "__main__":  # vLLM may start processes that import this file
    serve(load)
