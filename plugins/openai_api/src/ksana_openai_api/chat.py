"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.errors import renamed_params
from ksana.server.generation import Generation
from ksana.server.json_body import read_json
from ksana.server.json_response import json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.streaming import SSE, JsonStream, TextTemplate
from ksana.server.unsupported import refuse_unsupported
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana_openai_api.models import check_model
from ksana_openai_api.requests import ChatCompletionRequest, Message
from ksana_openai_api.responses import Envelope, StreamUsage, finish_of, usage_of
from ksana_openai_api.sampling import check_stream_options, make_sampling_params
from ksana_openai_api.unsupported import CHAT

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

_CHUNK = "chat.completion.chunk"


class ChatCompletions:
    """Serves chat completions for one engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whole or as a stream."""
        body = await read_json(request, ChatCompletionRequest)
        draft = self._make_draft(body)
        draft.external_id = request[REQUEST_ID]
        draft.final_only = not body.stream
        envelope = Envelope.create("chatcmpl", self._engine.served_model_name)
        source = "messages" if body.input_tokens is None else "input_tokens"
        with renamed_params({"prompt": source}):
            async with Generation(self._engine, [draft]) as generation:
                if body.stream:
                    return await self._stream(request, generation, envelope, StreamUsage(body.stream_options))
                [output] = await generation.results()
        return json_response(envelope.wrap("chat.completion", [_choice(output)], usage=usage_of([output])))

    def _make_draft(self, body: ChatCompletionRequest) -> RequestDraft:
        check_model(self._engine, body.model)
        refuse_unsupported(body.model_extra or {}, CHAT)
        check_stream_options(body)
        if body.messages is None and body.input_tokens is None:
            raise RequestError("messages is required", param="messages")
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        draft = RequestDraft(
            sampling=make_sampling_params(body, self._engine.model_config, max_tokens),
            additional_params=body.additional_params or {},
            chat_template_kwargs=dict(body.chat_template_kwargs or {}),
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
        )
        if body.input_tokens is not None:
            draft.prompt_token_ids = body.input_tokens
        else:
            draft.messages = [_plain_message(index, message) for index, message in enumerate(body.messages or ())]
        if body.add_generation_prompt is not None:
            draft.chat_template_kwargs["add_generation_prompt"] = body.add_generation_prompt
        return draft

    async def _stream(
        self, request: web.Request, generation: Generation, envelope: Envelope, usage: StreamUsage
    ) -> web.StreamResponse:
        await generation.wait_for_first()
        chunks = _Chunks(envelope, usage)
        async with JsonStream(request, SSE) as stream:
            async for _, output in generation:
                usage.update(0, output)
                if data := chunks.of(output):
                    await stream.send_encoded(data)
        return stream.response


class _Chunks:
    """Encodes the outputs of one stream."""

    def __init__(self, envelope: Envelope, usage: StreamUsage) -> None:
        self._envelope = envelope
        self._usage = usage
        self._text: TextTemplate | None = None
        self._role_sent = False

    def of(self, output: RequestOutput) -> bytes:
        """All chunks for one output: the role before the first text, the reason and the token counts after the last."""
        data = b""
        if not self._role_sent:
            self._role_sent = True
            data = self._encode({"role": "assistant", "content": ""})
        if output.text_delta:
            data += self._encode_text(output.text_delta)
        if output.finished:
            reason = finish_of(output.finish_reason)
            data += self._encode({}, finish_reason=reason, stop_reason=output.stop_reason)
            if self._usage.at_end:
                data += SSE.encode(self._envelope.wrap(_CHUNK, [], usage=self._usage.total()))
        return data

    def _encode_text(self, text: str) -> bytes:
        if self._usage.differs_by_chunk:
            return self._encode({"content": text})
        if self._text is None:
            self._text = TextTemplate(SSE, lambda content: self._chunk({"content": content}))
        return self._text.encode(text)

    def _encode(self, delta: dict[str, Any], **more: Any) -> bytes:
        return SSE.encode(self._chunk(delta, **more))

    def _chunk(self, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return self._envelope.wrap(_CHUNK, [choice], **self._usage.fields())


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    """What a chat template gets to see; it flattens text parts itself, and refuses others."""
    if message.content is None and not (message.model_extra or {}).get("tool_calls"):
        param = f"messages[{index}].content"
        raise RequestError(f"{param} is required", param=param)
    # Templates were written for the older name, and models trained with it.
    role = "system" if message.role == "developer" else message.role
    return {**(message.model_extra or {}), "role": role, "content": message.content}


def _choice(output: RequestOutput) -> dict[str, Any]:
    return {
        "index": 0,
        "message": {"role": "assistant", "content": output.text, "refusal": None},
        "logprobs": None,
        "finish_reason": finish_of(output.finish_reason),
        "stop_reason": output.stop_reason,
    }
