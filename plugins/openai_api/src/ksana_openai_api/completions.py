"""``POST /v1/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.generation import Generation
from ksana.server.json_body import read_json
from ksana.server.json_response import json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.streaming import SSE, JsonStream, TextTemplate
from ksana.server.unsupported import refuse_unsupported
from ksana.types.output import FinishReason, RequestOutput
from ksana.types.request import RequestDraft
from ksana_openai_api.models import check_model
from ksana_openai_api.requests import CompletionRequest
from ksana_openai_api.responses import Envelope, StreamUsage, finish_of, usage_of
from ksana_openai_api.sampling import check_stream_options, make_sampling_params
from ksana_openai_api.unsupported import COMPLETION

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

DEFAULT_MAX_TOKENS = 16
"""OpenAI's own default, which surprises everybody and is kept because programs rely on it."""

_KIND = "text_completion"


class Completions:
    """Serves text completions for one engine; several prompts become several choices."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whole or as a stream."""
        body = await read_json(request, CompletionRequest)
        drafts = self._make_drafts(body, request[REQUEST_ID])
        envelope = Envelope.create("cmpl", self._engine.served_model_name)
        async with Generation(self._engine, drafts) as generation:
            if body.stream:
                return await _stream(request, generation, envelope, StreamUsage(body.stream_options))
            outputs = await generation.results()
        choices = [
            _choice(index, output.text, output.finish_reason, output.stop_reason)
            for index, output in enumerate(outputs)
        ]
        return json_response(envelope.wrap(_KIND, choices, usage=usage_of(outputs)))

    def _make_drafts(self, body: CompletionRequest, request_id: str) -> list[RequestDraft]:
        check_model(self._engine, body.model)
        refuse_unsupported(body.model_extra or {}, COMPLETION)
        check_stream_options(body)
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = make_sampling_params(body, self._engine.model_config, max_tokens)
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


def parse_prompts(prompt: object, max_prompts: int) -> list[str | list[int]]:
    """Tell the four shapes of ``prompt`` apart: text, texts, token ids, lists of token ids.

    Args:
        max_prompts: most prompts that the engine's queue takes at once.

    Raises:
        RequestError: it has none of them, or holds too many; ``param`` names the first element that is wrong.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise RequestError("prompt must be a string, a list of strings, token ids or a list of them", param="prompt")
    if not prompt:
        raise RequestError("prompt must not be empty", param="prompt")
    if isinstance(prompt[0], int):
        return [_check_token_ids(prompt, "prompt")]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"prompt holds {len(prompt)} prompts, more than the {max_prompts} that this server takes at once; "
            "send them in several calls",
            param="prompt",
        )
    return [_check_prompt(item, f"prompt[{index}]") for index, item in enumerate(prompt)]


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


async def _stream(
    request: web.Request, generation: Generation, envelope: Envelope, usage: StreamUsage
) -> web.StreamResponse:
    await generation.wait_for_first()
    chunks = _Chunks(envelope, usage)
    async with JsonStream(request, SSE) as stream:
        async for index, output in generation:
            usage.update(index, output)
            if output.text_delta or output.finished:
                await stream.send_encoded(chunks.of(index, output))
        if usage.at_end:
            await stream.send(envelope.wrap(_KIND, [], usage=usage.total()))
    return stream.response


class _Chunks:
    """Encodes the outputs of one stream."""

    def __init__(self, envelope: Envelope, usage: StreamUsage) -> None:
        self._envelope = envelope
        self._usage = usage
        self._texts: dict[int, TextTemplate] = {}

    def of(self, index: int, output: RequestOutput) -> bytes:
        """The chunk for an output of choice ``index``."""
        if output.finished or self._usage.differs_by_chunk:
            return SSE.encode(self._chunk(_choice(index, output.text_delta, output.finish_reason, output.stop_reason)))
        template = self._texts.get(index)
        if template is None:
            template = TextTemplate(SSE, lambda text: self._chunk(_choice(index, text, None, None)))
            self._texts[index] = template
        return template.encode(output.text_delta)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._envelope.wrap(_KIND, [choice], **self._usage.fields())


def _choice(index: int, text: str, finish_reason: FinishReason | None, stop_reason: str | int | None) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_of(finish_reason),
        "stop_reason": stop_reason,
    }
