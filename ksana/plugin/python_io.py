"""What a ``KsanaPlugin`` sees of a request and of its answer: objects with the names of the original engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ksana.errors import RequestError
from ksana.plugin.refit import InputRefitEmbedding
from ksana.plugin.sampling_view import SamplingConfig

if TYPE_CHECKING:
    from ksana.engine.context import ProcessingContext
    from ksana.types.output import RequestOutput
    from ksana.types.request import RequestDraft


class KsanaPythonInput:
    """A request on its way into the engine. Fields may be assigned and edited; only ``preprocess`` is listened to.

    Attributes:
        model_name: name of the model.
        sampling_config: decoding options.
        prompt: the prompt as text, or None. Assign to it to replace the whole input.
        input_refit_embedding: rows that replace embeddings of prompt tokens.
        request_target, structured_output_regex: part of the original's interface; not available, leave them empty.
    """

    __slots__ = (
        "_context",
        "_draft",
        "_initial_tokens",
        "_tokens",
        "input_refit_embedding",
        "model_name",
        "prompt",
        "request_target",
        "sampling_config",
        "structured_output_regex",
    )

    def __init__(self, draft: RequestDraft, context: ProcessingContext, token_ids: list[int] | None = None) -> None:
        self._draft = draft
        self._context = context
        known = draft.prompt_token_ids if token_ids is None else token_ids
        self._tokens = None if known is None else list(known)
        self._initial_tokens = None if known is None else list(known)
        self.model_name = context.model_config.name
        self.prompt = draft.prompt
        self.sampling_config = SamplingConfig.from_params(draft.sampling)
        self.input_refit_embedding = InputRefitEmbedding.from_embeddings(draft.embeddings)
        self.request_target: dict[str, Any] = {}
        self.structured_output_regex = ""

    @property
    def input_tokens(self) -> list[int]:
        """Token ids of the prompt: edit the list or assign one to replace the whole input.

        The prompt's text is tokenised when this is first read. A request with ``messages`` starts with an empty list.
        If the plugin changes ``prompt`` as well, the tokens count.
        """
        if self._tokens is None:
            self._tokens = self._tokenize()
            self._initial_tokens = list(self._tokens)
        return self._tokens

    @input_tokens.setter
    def input_tokens(self, token_ids: list[int]) -> None:
        self._tokens = [int(token) for token in token_ids]  # numpy and torch integers become plain ones

    def apply_changes(self) -> None:
        """Write what the plugin changed into the draft.

        Raises:
            RequestError: a value is invalid, or asks for what this version does not have.
        """
        for name in ("request_target", "structured_output_regex"):
            if getattr(self, name):
                raise RequestError(f"{name} is not available in this version", param=name)
        draft = self._draft
        if self._tokens is not None and self._tokens != self._initial_tokens:
            draft.prompt_token_ids = self._tokens
            draft.prompt = draft.messages = None
        elif self.prompt != draft.prompt:
            draft.prompt = self.prompt
            draft.prompt_token_ids = draft.messages = None
        draft.sampling = self.sampling_config.to_params(draft.sampling)
        draft.embeddings = self.input_refit_embedding.to_embeddings(self._context.model_config.hidden_size)

    def _tokenize(self) -> list[int]:
        if self._draft.prompt is None:
            return []
        return self._context.tokenizer.encode(self._draft.prompt, add_special_tokens=self._draft.add_special_tokens)


class KsanaPythonOutput:
    """The whole answer to one request.

    Attributes:
        input_tokens: the prompt as the engine ran it.
        output_tokens: generated tokens, one list per sequence.
        logprobs: for each sequence, for each generated token, [token id, log probability] of the token itself, then of
            the likeliest; empty if ``sampling_config.logprobs`` was 0. Changing it has no effect.
        texts: generated text, one string per sequence.
        finish_status: ``stop`` or ``length``. Changing it has no effect.
        extra: results of the plugin, JSON values by name; the native API sends them along.
    """

    __slots__ = ("_output", "extra", "finish_status", "input_tokens", "logprobs", "output_tokens", "texts")

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        self.input_tokens = list(output.prompt_token_ids)
        self.output_tokens = [list(output.token_ids)]
        self.texts = [output.text]
        self.logprobs = [[entry.as_pairs() for entry in output.logprobs]]
        self.finish_status = "" if output.finish_reason is None else output.finish_reason.value
        self.extra = dict(output.extra)

    def apply_changes(self) -> None:
        """Write what the plugin changed into the output.

        Raises:
            ValueError: the plugin changed the number of sequences.
        """
        (self._output.token_ids,) = self.output_tokens
        (self._output.text,) = self.texts
        self._output.extra = self.extra
