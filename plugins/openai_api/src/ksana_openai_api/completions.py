"""``POST /v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.errors import renamed_params
from ksana.server.generation import Generation
from ksana.server.json_body import read_json
from ksana.server.json_response import json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.operations import describes
from ksana.server.streaming import SSE, JsonStream, TextTemplate
from ksana.server.unsupported import refuse_unsupported
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams
from ksana_openai_api.answers import Envelope, StreamUsage, usage_of
from ksana_openai_api.completion_choices import ChoiceFormat, ChoicePieces
from ksana_openai_api.logprobs import LogprobFormat
from ksana_openai_api.models import check_model
from ksana_openai_api.prompts import parse_prompts
from ksana_openai_api.requests import CompletionRequest
from ksana_openai_api.sampling import check_stream_options, make_sampling_params
from ksana_openai_api.structure import grammar_param
from ksana_openai_api.unsupported import COMPLETION

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default, which surprises everybody and is kept because programs rely on it."""

_KIND = "text_completion"


class Completions:
    """Serves text completions for one engine; several prompts become several choices, ``n`` each."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._logprobs = LogprobFormat(engine.tokenizer)

    @describes("Continue a prompt", request=CompletionRequest, stream="text/event-stream")
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whole or as a stream."""
        body = await read_json(request, CompletionRequest)
        check_model(self._engine, body.model)
        refuse_unsupported(body.model_extra or {}, COMPLETION)
        check_stream_options(body)
        with renamed_params(_param_names(body)):
            drafts = self._make_drafts(body, request[REQUEST_ID])
            async with Generation(self._engine, drafts) as generation:
                if body.stream:
                    return await self._stream(request, generation, drafts, body)
                outputs = await generation.results()
        return json_response(self._answer(drafts, outputs, body))

    def _make_drafts(self, body: CompletionRequest, request_id: str) -> list[RequestDraft]:
        sampling = self._sampling(body)
        return [
            RequestDraft(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=None if isinstance(prompt, str) else prompt,
                sampling=sampling,
                additional_params=dict(body.additional_params or {}),
                add_special_tokens=body.add_special_tokens is not False,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                final_only=not body.stream,
                external_id=request_id,
            )
            for prompt in parse_prompts(body.prompt, self._engine.config.scheduler.max_waiting_queue_len)
        ]

    def _sampling(self, body: CompletionRequest) -> SamplingParams:
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = make_sampling_params(body, self._engine.model_config, max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            sampling = replace(sampling, prompt_logprobs=body.logprobs)
        if body.best_of is None:
            return sampling
        count = _best_of(body)
        return replace(sampling, num_beams=count) if body.use_beam_search else replace(sampling, best_of=count)

    def _answer(
        self, drafts: list[RequestDraft], outputs: list[RequestOutput], body: CompletionRequest
    ) -> dict[str, Any]:
        per_prompt = len(outputs) // len(drafts)
        format = ChoiceFormat.of(body, self._logprobs)
        choices = [
            format.whole(index, self._prompt_text(drafts[index // per_prompt], output) if format.echo else "", output)
            for index, output in enumerate(outputs)
        ]
        envelope = Envelope.create("cmpl", self._engine.served_model_name)
        return envelope.wrap(_KIND, choices, usage=usage_of(enumerate(outputs), per_prompt))

    async def _stream(
        self, request: web.Request, generation: Generation, drafts: list[RequestDraft], body: CompletionRequest
    ) -> web.StreamResponse:
        await generation.wait_for_first()
        per_prompt = len(generation.streams) // len(drafts)
        envelope = Envelope.create("cmpl", self._engine.served_model_name)
        usage = StreamUsage(body.stream_options, per_prompt)
        format = ChoiceFormat.of(body, self._logprobs)
        choices: dict[int, _Chunks] = {}
        async with JsonStream(request, SSE) as stream:
            async for index, output in generation:
                usage.update(index, output)
                if index not in choices:
                    prompt = self._prompt_text(drafts[index // per_prompt], output) if format.echo else ""
                    choices[index] = _Chunks(index, prompt, format, envelope, usage)
                if data := choices[index].of(output):
                    await stream.send_encoded(data)
            if usage.at_end:
                await stream.send(envelope.wrap(_KIND, [], usage=usage.total()))
        return stream.response

    def _prompt_text(self, draft: RequestDraft, output: RequestOutput) -> str:
        if draft.prompt is not None:
            return draft.prompt
        return self._engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)


class _Chunks:
    """Encodes the outputs of one choice."""

    def __init__(self, index: int, prompt: str, format: ChoiceFormat, envelope: Envelope, usage: StreamUsage) -> None:
        self._pieces = ChoicePieces(index, prompt, format)
        self._envelope = envelope
        self._usage = usage
        self._is_uniform = format.is_text_alone and not usage.differs_by_chunk
        self._has_more_than_text = not format.is_text_alone
        self._text: TextTemplate | None = None

    def of(self, output: RequestOutput) -> bytes:
        """The chunk for an output; none if it has nothing to tell."""
        if output.finished or not self._is_uniform:
            tells = output.finished or output.text_delta or (self._has_more_than_text and output.token_ids_delta)
            return self._encode(output, output.text_delta) if tells else b""
        if not output.text_delta:
            return b""
        if self._text is None:
            self._text = TextTemplate(SSE, lambda text: self._chunk(output, text))
        return self._text.encode(output.text_delta)

    def _encode(self, output: RequestOutput, text: str) -> bytes:
        return SSE.encode(self._chunk(output, text))

    def _chunk(self, output: RequestOutput, text: str) -> dict[str, Any]:
        piece = self._pieces.next(output, text, output.token_ids_delta)
        return self._envelope.wrap(_KIND, [piece], **self._usage.fields())


def _param_names(body: CompletionRequest) -> dict[str, str]:
    names = {"num_beams": "n" if body.best_of is None else "best_of"}
    source = grammar_param(body)
    return names if source is None else {**names, "grammar": source}


def _best_of(body: CompletionRequest) -> int:
    n, best_of = body.n or 1, body.best_of or 1
    if best_of < n:
        raise RequestError(f"best_of is {best_of}, but it must be at least n, which is {n}", param="best_of")
    if body.stream and best_of > n:
        raise RequestError("the best of several texts is known at the end only: best_of cannot stream", param="best_of")
    return best_of
