"""From a draft to a request: rendering, tokenisation, and every check that a client can fail."""

from __future__ import annotations

import hashlib
import itertools
import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ksana.engine.context import ProcessingContext
from ksana.errors import KsanaCode, RequestError
from ksana.types.capture import Capture
from ksana.types.request import InputEmbedding, Request, RequestDraft
from ksana.types.sampling import SamplingParams

_SEED_MASK = 2**64 - 1

_PROBED_CHARACTERS_PER_TOKEN = 16
"""Of a text far longer than the model's context, so many characters for each token of it are tokenised first."""


def sequence_seeds(seed: int, count: int) -> list[int]:
    """Seeds for the sequences of one prompt: the first has ``seed`` itself, the others follow from it."""
    hashes = (hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest() for index in range(1, count))
    return [seed, *(int.from_bytes(each, "little") for each in hashes)]


def _captures(draft: RequestDraft, token_ids: list[int]) -> tuple[Capture, ...]:
    """What of the prompt is to be reported. Nothing precedes its first token, and nothing follows its last."""
    captures = tuple(draft.captures(token_ids)) if callable(draft.captures) else draft.captures
    top = draft.sampling.prompt_logprobs
    return captures if top is None else (*captures, Capture("logprobs", range(len(token_ids) - 1), top))


class Admission:
    """Makes validated requests with ids of the engine's own, so that clients may repeat theirs."""

    def __init__(self, context: ProcessingContext) -> None:
        self._context = context
        self._counter = itertools.count()

    def admit(self, draft: RequestDraft) -> Request:
        """Tokenise and validate. Thread-safe, and slow for long prompts.

        Returns:
            The first sequence, and behind it as its followers the others that the draft asks for.

        Raises:
            RequestError: naming the field at fault.
        """
        token_ids = self._token_ids(draft)
        self._check_tokens(token_ids)
        self._check_embeddings(draft.embeddings, len(token_ids))
        self._check_sampling(draft.sampling)
        bad_words = self._encode_words(draft.sampling.bad_words)
        seed = secrets.randbits(64) if draft.sampling.seed is None else draft.sampling.seed & _SEED_MASK
        seeds = sequence_seeds(seed, draft.sampling.num_sequences)
        captures = _captures(draft, token_ids)
        leader, *followers = [self._request(draft, token_ids, bad_words, captures, each) for each in seeds]
        leader.lead(followers)
        return leader

    def _request(
        self,
        draft: RequestDraft,
        token_ids: list[int],
        bad_words: tuple[tuple[int, ...], ...],
        captures: tuple[Capture, ...],
        seed: int,
    ) -> Request:
        limit, sampling = self._context.max_model_len, draft.sampling
        wanted = sampling.max_tokens
        if sampling.num_sequences > sampling.n and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # the likeliest are to be chosen
        return Request(
            request_id=f"{next(self._counter)}-{draft.external_id or 'request'}",
            prompt_token_ids=token_ids,
            sampling=sampling,
            max_total_tokens=limit if wanted is None else min(limit, len(token_ids) + wanted),
            seed=seed,
            eos_token_ids=self._context.model_config.eos_token_ids,
            embeddings=tuple(draft.embeddings),
            bad_words=bad_words,
            captures=captures,
            cache_salt=draft.cache_salt,
            priority=draft.priority,
            final_only=draft.final_only,
            trace_context=draft.trace_context,
        )

    def _token_ids(self, draft: RequestDraft) -> list[int]:
        given = [draft.prompt is not None, draft.prompt_token_ids is not None, draft.messages is not None]
        if sum(given) != 1:
            raise RequestError(
                "give exactly one of a prompt, prompt token ids and messages" if any(given) else "there is no prompt",
                param="prompt",
            )
        if draft.prompt_token_ids is not None:
            return draft.prompt_token_ids
        if draft.prompt is not None:
            return self._encode(draft.prompt, add_special_tokens=draft.add_special_tokens)
        assert draft.messages is not None
        if self._context.chat_template is None:
            raise RequestError("this model has no chat template; send a prompt instead of messages", param="messages")
        text = self._context.chat_template.render(draft.messages, **draft.chat_template_kwargs)
        # The template has written the special tokens itself.
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenise; a text that is hopelessly too long is refused by its beginning, before it costs seconds and GiB."""
        encode, limit = self._context.tokenizer.encode, self._context.max_model_len
        probed = limit * _PROBED_CHARACTERS_PER_TOKEN
        while 2 * probed < len(text):
            beginning = len(encode(text[:probed], add_special_tokens=add_special_tokens))
            # Tokenizers work locally: what follows may change the last of these tokens, but never half of them.
            if beginning >= 2 * limit:
                raise self._too_long(f"more than {beginning}")
            probed *= 2  # long tokens, as those of many spaces are
        return encode(text, add_special_tokens=add_special_tokens)

    def _check_tokens(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(token_ids) >= self._context.max_model_len:
            raise self._too_long(str(len(token_ids)))
        self._check_ids(token_ids, "prompt")

    def _too_long(self, num_tokens: str) -> RequestError:
        return RequestError(
            f"This model's maximum context length is {self._context.max_model_len} tokens, but the prompt has "
            f"{num_tokens} and at least one more is generated.",
            code="context_length_exceeded",
            param="prompt",
            ksana_code=KsanaCode.LENGTH_EXCEEDED,
        )

    def _check_sampling(self, sampling: SamplingParams) -> None:
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.grammar_after, "grammar_after")
        self._check_ids([token for token, _ in sampling.logit_bias], "logit_bias")

    def _encode_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Token sequences of words as they stand at the beginning of a text, or within a word, and behind a space."""
        encode = self._context.tokenizer.encode
        forms = [form for word in words for form in (word, f" {word}")]
        sequences = dict.fromkeys(tuple(encode(form, add_special_tokens=False)) for form in forms)
        return tuple(filter(None, sequences))

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        vocab_size = self._context.model_config.vocab_size
        for token in token_ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise RequestError(
                    f"{param} holds {token!r}, which is no token id: they are integers from 0 to {vocab_size - 1}",
                    param=param,
                )

    def _check_embeddings(self, embeddings: list[InputEmbedding], num_tokens: int) -> None:
        hidden = self._context.model_config.hidden_size
        for embedding in embeddings:
            shape = embedding.rows.shape
            problem = None
            if len(shape) != 2 or shape[1] != hidden or shape[0] == 0:
                problem = f"have shape {list(shape)}, but rows of {hidden} numbers are needed"
            elif embedding.position < 0 or embedding.position + shape[0] > num_tokens:
                problem = f"cover positions {embedding.position} to {embedding.position + shape[0] - 1}, "
                problem += f"but the prompt has {num_tokens} tokens"
            elif not np.isfinite(embedding.rows).all():
                problem = "hold NaN or infinity"
            if problem:
                raise RequestError(f"the input embeddings {problem}", param="input_refit_embedding")
