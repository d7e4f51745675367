"""``POST /v1/responses``, and what can be done with responses that are remembered."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.auth import identity_of
from ksana.server.errors import renamed_params
from ksana.server.generation import Generation
from ksana.server.json_body import parse_json, read_json
from ksana.server.json_response import dump_json, json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.operations import describes
from ksana.server.streaming import JsonStream
from ksana_openai_api.models import check_model
from ksana_openai_api.output_parsers import ChatParsers
from ksana_openai_api.responses.answer import Answer
from ksana_openai_api.responses.chat_body import chat_body, param_names
from ksana_openai_api.responses.conversation import Item, chat_messages, kept_items
from ksana_openai_api.responses.event_stream import EventWriter
from ksana_openai_api.responses.input_page import input_page
from ksana_openai_api.responses.requests import ResponseRequest, check_supported
from ksana_openai_api.responses.store import ResponseStore, StoredResponse
from ksana_openai_api.turn import ChatTurn, prepare_turn

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

_PATH = "/v1/responses"


class Responses:
    """Serves the Responses API for one engine.

    Args:
        parsers: of tool calls and reasoning, as the operator has chosen them.
        store: what is remembered.
    """

    def __init__(self, engine: AsyncEngine, parsers: ChatParsers, store: ResponseStore) -> None:
        self._engine = engine
        self._parsers = parsers
        self._store = store

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Add all routes of this API."""
        one = f"{_PATH}/{{response_id}}"
        router.add_post(_PATH, self.create)
        router.add_get(one, self.get)
        router.add_delete(one, self.delete)
        router.add_post(f"{one}/cancel", self.cancel)
        router.add_get(f"{one}/input_items", self.list_input_items)

    @describes("Answer a conversation, and remember it", request=ResponseRequest, stream="text/event-stream")
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer one request, whole or as a stream of events."""
        body = await read_json(request, ResponseRequest)
        check_model(self._engine, body.model)
        check_supported(body)
        owner = identity_of(request).name
        items = kept_items(body.input, self._previous(owner, body.previous_response_id))
        with renamed_params(param_names(body)):
            turn = self._prepare(body, items)
            turn.draft.external_id = request[REQUEST_ID]
            is_kept = self._is_kept(body)
            answer = Answer(self._engine, turn, body, is_kept=is_kept)
            keep = partial(self._keep, owner, items) if is_kept else _forget
            async with Generation(self._engine, [turn.draft]) as generation:
                if body.stream:
                    return await self._stream(request, generation, answer, keep)
                async for _, output in generation:
                    answer.read(output)
        keep(answer)
        return json_response(answer.as_json())

    @describes("A response that is remembered")
    async def get(self, request: web.Request) -> web.Response:
        """The response object."""
        if request.query.get("stream", "false") != "false":
            raise RequestError(
                "a response that is remembered is not streamed again; leave stream out",
                code="unsupported_parameter",
                param="stream",
            )
        return web.Response(body=self._stored(request).response, content_type="application/json")

    @describes("Forget a response")
    async def delete(self, request: web.Request) -> web.Response:
        """Forget it at once."""
        response_id = request.match_info["response_id"]
        self._store.delete(identity_of(request).name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @describes("Refused: only background responses can be cancelled, and there are none")
    async def cancel(self, request: web.Request) -> web.Response:
        """A running response is cancelled by closing its connection."""
        self._stored(request)
        raise RequestError("only a response that runs in the background can be cancelled, and this one has ended")

    @describes("What a response was made from, a page at a time")
    async def list_input_items(self, request: web.Request) -> web.Response:
        """The conversation before the response, that of earlier responses included."""
        return json_response(input_page(parse_json(self._stored(request).input_items), request.query))

    def _stored(self, request: web.Request) -> StoredResponse:
        return self._store.get(identity_of(request).name, request.match_info["response_id"])

    def _previous(self, owner: str, response_id: str | None) -> list[Item]:
        """The conversation that a request goes on with."""
        if response_id is None:
            return []
        stored = self._store.get(owner, response_id, param="previous_response_id")
        items: list[Item] = parse_json(stored.input_items)
        output: list[Item] = parse_json(stored.response)["output"]
        return items + output

    def _is_kept(self, body: ResponseRequest) -> bool:
        if body.store and not self._store.is_enabled:
            raise RequestError(
                "store: this server keeps no responses (--response-store-size 0); set it to false or leave it out",
                code="unsupported_parameter",
                param="store",
            )
        return self._store.is_enabled and body.store is not False

    def _prepare(self, body: ResponseRequest, items: list[Item]) -> ChatTurn:
        turn = prepare_turn(self._engine, self._parsers, chat_body(body, chat_messages(items, body.instructions)))
        # Which tokens belong to the content is seen while they come.
        turn.draft.final_only = not (body.stream or body.wants_logprobs)
        return turn

    def _keep(self, owner: str, items: list[Item], answer: Answer) -> None:
        response = answer.as_json()
        if response["status"] != "failed":
            self._store.put(owner, answer.id, StoredResponse(dump_json(response), dump_json(items)))

    async def _stream(
        self, request: web.Request, generation: Generation, answer: Answer, keep: Callable[[Answer], None]
    ) -> web.StreamResponse:
        await generation.wait_for_first()
        writer = EventWriter(answer)
        async with JsonStream(request, writer.framing) as stream:
            await stream.send_encoded(writer.encode(answer.begin()))
            async for _, output in generation:
                data = writer.encode(answer.read(output))
                if output.finished:
                    keep(answer)  # before the client hears of the end, and goes on from it
                if data:
                    await stream.send_encoded(data)
        return stream.response


def _forget(answer: Answer) -> None:
    """Keep nothing."""
