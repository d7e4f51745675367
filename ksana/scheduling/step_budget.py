"""How many tokens a step may still compute, and how many of them of prompts."""

from __future__ import annotations

from ksana.types.config import SchedulerConfig


class StepBudget:
    """The tokens of a step that are left.

    A short prompt, or what is left of one, is computed as soon as there are tokens for it: nobody waits for long. Long
    ones mind the others. As soon as somebody decodes, there are ``max_mixed_prefill_tokens`` for those who decode and
    for long prompts together, of which these get a quarter at least: they go on, however many decode.

    Attributes:
        tokens: that are left.
        reserved: of those left, how many long prompts leave to others.
        num_decoding: texts that go on by one token in the step. Their drafts leave the part of prompts alone.
    """

    __slots__ = ("_expected", "_long", "_mixed", "_num_completed", "_threshold", "num_decoding", "reserved", "tokens")

    def __init__(self, config: SchedulerConfig, expected_decoding: int) -> None:
        self.tokens = self._long = config.max_num_batched_tokens
        self.reserved = self.num_decoding = self._num_completed = 0
        self._expected = expected_decoding
        self._mixed = config.max_mixed_prefill_tokens
        self._threshold = config.long_prefill_token_threshold

    @property
    def num_decoding_next(self) -> int:
        """Texts that will probably go on by one token in the next step."""
        return self.num_decoding + self._num_completed

    def is_short(self, num_tokens: int) -> bool:
        """Whether a prompt with so many tokens left to compute is a short one."""
        return num_tokens <= self._threshold

    def for_prompt(self, num_tokens: int) -> int:
        """Of a prompt with so many tokens left to compute, how many may be computed in the step."""
        if self.is_short(num_tokens):
            return min(num_tokens, self.tokens)
        decoding = max(self._expected, self.num_decoding)
        if decoding and self._mixed:
            self._long = min(self._long, max(self._mixed - decoding, self._mixed // 4))
        return min(num_tokens, self._long, max(self.tokens - self.reserved, 0))

    def spend_on_prompt(self, num_tokens: int, *, is_last: bool) -> None:
        """So many tokens of a prompt are computed in the step; is_last: up to its end."""
        self.tokens -= num_tokens
        self._long = max(self._long - num_tokens, 0)
        self._num_completed += is_last
