"""How many tokens a step may still compute, and how many of them of prompts."""

from __future__ import annotations

from ksana.types.config import SchedulerConfig


class StepBudget:
    """The tokens of a step that are left.

    Whoever decodes must not wait long for other people's prompts, and takes time in the step as well. So as soon as
    somebody decodes, there are ``max_mixed_prefill_tokens`` for those who decode and for prompts together, of which
    prompts get a quarter at least: they go on, however many decode.

    Attributes:
        tokens: that are left.
        num_decoding: texts that go on by one token in the step. Their drafts leave the part of prompts alone.
    """

    __slots__ = ("_mixed", "_prompt_tokens", "num_decoding", "tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens = self._prompt_tokens = config.max_num_batched_tokens
        self.num_decoding = 0
        self._mixed = config.max_mixed_prefill_tokens or self.tokens

    @property
    def prompt_tokens(self) -> int:
        """Of those left, how many may be computed of prompts: of whatever goes on by several at a time."""
        if self.num_decoding:
            mixed = max(self._mixed - self.num_decoding, self._mixed // 4)
            self._prompt_tokens = min(self._prompt_tokens, mixed)
        return min(self._prompt_tokens, self.tokens)

    def spend_on_prompt(self, num_tokens: int) -> None:
        """So many tokens of a prompt are computed in the step."""
        self.tokens -= num_tokens
        self._prompt_tokens = max(self._prompt_tokens - num_tokens, 0)
