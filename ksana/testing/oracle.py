"""transformers as the oracle of greedy decoding, for tests of models and backends. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from ksana.types.output import RequestOutput


class TransformersOracle:
    """A transformers model in float32.

    A greedy answer is checked with one forward over prompt and answer: it is what greedy decoding gives if each of its
    tokens is the likeliest after all that stand before it.

    Args:
        path: folder, or ``.gguf`` file, of the model.
    """

    def __init__(self, path: Path) -> None:
        import torch
        import transformers

        source: dict[str, Any] = {"pretrained_model_name_or_path": path, "attn_implementation": "eager"}
        if path.suffix == ".gguf":
            source["pretrained_model_name_or_path"] = path.parent
            source["gguf_file"] = path.name
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(dtype=torch.float32, **source).eval()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [len(token_ids), vocab_size]."""
        import torch

        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    def output_logits(self, output: RequestOutput) -> torch.Tensor:
        """float32 [len(output.token_ids), vocab_size]: what each token of the output was chosen from."""
        return self.logits(output.prompt_token_ids + output.token_ids)[len(output.prompt_token_ids) - 1 : -1]

    def greedy_after(self, output: RequestOutput) -> list[int]:
        """The likeliest token at each place of the output, given everything before it."""
        return self.output_logits(output).argmax(-1).tolist()

    def generate(self, prompt: list[int], count: int) -> list[int]:
        """The ``count`` tokens that transformers' own greedy decoding gives, end-of-sequence ignored."""
        import torch

        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return [int(token) for token in output[0, len(prompt) :]]

    def beam_search(self, prompt: list[int], num_beams: int, **options: Any) -> list[tuple[list[int], float]]:
        """Tokens and score of every beam, the best first, as transformers' own search finds them.

        Args:
            options: further ones of ``generate``; end-of-sequence tokens are those of ``eos_token_id`` alone.
        """
        import torch

        ids = torch.tensor([prompt])
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **{"eos_token_id": None, **options},
        )
        ends = (len(prompt) + (found.beam_indices >= 0).sum(-1)).tolist()
        tokens = [row[len(prompt) : end].tolist() for row, end in zip(found.sequences, ends, strict=True)]
        return list(zip(tokens, found.sequences_scores.tolist(), strict=True))
