"""transformers ``generate``: one padded batch, attention by torch."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Generate, serve
from transformers import AutoModelForCausalLM


def load(settings: dict[str, Any]) -> Generate:
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)  # all of one length, so there is nothing to pad
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=model.config.eos_token_id,
        )
        return output[:, ids.shape[1] :].tolist()

    return generate


if __name__ == "__main__":
    serve(load)
