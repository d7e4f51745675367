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
from ksana.server.streaming import SSE, JsonStream
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
        async with JsonStream(request, SSE) as stream:

            async def send(delta: dict[str, Any], **more: Any) -> None:
                choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, **more}
                await stream.send(envelope.wrap(_CHUNK, [choice], **usage.fields()))

            role_sent = False
            async for _, output in generation:
                usage.update(0, output)
                if not role_sent:
                    await send({"role": "assistant", "content": ""})
                    role_sent = True
                if output.text_delta:
                    await send({"content": output.text_delta})
                if output.finished:
                    await send({}, finish_reason=finish_of(output.finish_reason), stop_reason=output.stop_reason)
            if usage.at_end:
                await stream.send(envelope.wrap(_CHUNK, [], usage=usage.total()))
        return stream.response


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
