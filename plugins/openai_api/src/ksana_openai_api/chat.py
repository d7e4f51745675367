"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.server.errors import renamed_params
from ksana.server.generation import Generation
from ksana.server.json_body import read_json
from ksana.server.json_response import json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.operations import describes
from ksana.server.streaming import SSE, JsonStream
from ksana.server.unsupported import refuse_unsupported
from ksana.types.output import RequestOutput
from ksana_openai_api.answers import Envelope, StreamUsage, usage_of
from ksana_openai_api.chat_chunks import ChatChunks
from ksana_openai_api.choice import ChoiceReader
from ksana_openai_api.logprobs import LogprobFormat
from ksana_openai_api.models import check_model
from ksana_openai_api.output_parsers import ChatParsers
from ksana_openai_api.requests import ChatCompletionRequest
from ksana_openai_api.sampling import check_stream_options
from ksana_openai_api.structure import grammar_param
from ksana_openai_api.turn import ChatTurn, prepare_turn
from ksana_openai_api.unsupported import CHAT

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

PARAM_NAMES = {
    "prompt": "messages",
    "max_tokens": "max_completion_tokens",
    "num_beams": "n",
}
"""This API's names for what the engine calls otherwise."""


class ChatCompletions:
    """Serves chat completions for one engine.

    Args:
        parsers: of tool calls and reasoning, as the operator has chosen them.
    """

    def __init__(self, engine: AsyncEngine, parsers: ChatParsers) -> None:
        self._engine = engine
        self._parsers = parsers
        self._logprobs = LogprobFormat(engine.tokenizer)

    @describes("Answer a conversation", request=ChatCompletionRequest, stream="text/event-stream")
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whole or as a stream."""
        body = await read_json(request, ChatCompletionRequest)
        check_model(self._engine, body.model)
        refuse_unsupported(body.model_extra or {}, CHAT)
        check_stream_options(body)
        with renamed_params(_param_names(body)):
            turn = prepare_turn(self._engine, self._parsers, body)
            turn.draft.external_id = request[REQUEST_ID]
            turn.draft.final_only = not body.stream
            async with Generation(self._engine, [turn.draft]) as generation:
                if body.stream:
                    return await self._stream(request, generation, turn, body)
                outputs = await generation.results()
        return json_response(self._answer(turn, outputs, body))

    def _answer(self, turn: ChatTurn, outputs: list[RequestOutput], body: ChatCompletionRequest) -> dict[str, Any]:
        envelope = Envelope.create("chatcmpl", self._engine.served_model_name)
        choices = [self._choice(turn, index, output, body) for index, output in enumerate(outputs)]
        answer = envelope.wrap("chat.completion", choices, usage=usage_of(enumerate(outputs), len(outputs)))
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._logprobs.prompt(outputs[0].prompt_logprobs)
        if body.return_token_ids:
            answer["prompt_token_ids"] = outputs[0].prompt_token_ids
        return answer

    def _choice(self, turn: ChatTurn, index: int, output: RequestOutput, body: ChatCompletionRequest) -> dict[str, Any]:
        reader = self._reader(turn, output.prompt_token_ids)
        reader.read_whole(output)
        choice: dict[str, Any] = {
            "index": index,
            "message": reader.message(),
            "logprobs": self._logprobs.chat(output.logprobs) if body.logprobs else None,
            "finish_reason": reader.finish_reason(output),
            "stop_reason": output.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def _reader(self, turn: ChatTurn, prompt_token_ids: list[int]) -> ChoiceReader:
        parser = turn.create_parser(self._engine, prompt_token_ids)
        return ChoiceReader(parser, parallel_calls=turn.tools.parallel)

    async def _stream(
        self, request: web.Request, generation: Generation, turn: ChatTurn, body: ChatCompletionRequest
    ) -> web.StreamResponse:
        await generation.wait_for_first()
        envelope = Envelope.create("chatcmpl", self._engine.served_model_name)
        usage = StreamUsage(body.stream_options, len(generation.streams))
        logprobs = self._logprobs if body.logprobs else None
        choices: dict[int, ChatChunks] = {}
        async with JsonStream(request, SSE) as stream:
            async for index, output in generation:
                usage.update(index, output)
                if index not in choices:
                    reader = self._reader(turn, output.prompt_token_ids)
                    choices[index] = ChatChunks(index, reader, envelope, usage, logprobs)
                if data := choices[index].of(output):
                    await stream.send_encoded(data)
            if usage.at_end:
                await stream.send_encoded(ChatChunks.last(envelope, usage))
        return stream.response


def _param_names(body: ChatCompletionRequest) -> dict[str, str]:
    names = dict(PARAM_NAMES)
    if body.input_tokens is not None:
        names["prompt"] = "input_tokens"
    if body.max_completion_tokens is None:
        del names["max_tokens"]
    names["grammar"] = grammar_param(body) or "tools"
    if body.top_logprobs is not None:
        names["logprobs"] = "top_logprobs"
    return names
