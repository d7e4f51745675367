"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

from aiohttp import web
from pydantic import Field

from ksana.engine.embedding import Embedder
from ksana.server.errors import renamed_params
from ksana.server.generation import Generation
from ksana.server.json_body import read_json
from ksana.server.json_response import json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.operations import describes
from ksana.server.unsupported import NeutralValues, refuse_unsupported
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana_openai_api.models import check_model
from ksana_openai_api.prompts import parse_prompts
from ksana_openai_api.requests import Body

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

_UNSUPPORTED: NeutralValues = {
    "messages": ([],),
    "truncate_prompt_tokens": (),
    "normalize": (True,),
}


class EmbeddingRequest(Body):
    """Texts, or the token ids of them, to be made into vectors."""

    input: Any = Field(description="a string, a list of strings, token ids, or a list of lists of them")
    model: str | None = None
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None


class Embeddings:
    """Serves embeddings for one engine; several inputs are computed at once."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @describes("Make vectors of texts", request=EmbeddingRequest)
    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request."""
        body = await read_json(request, EmbeddingRequest)
        check_model(self._engine, body.model)
        refuse_unsupported(body.model_extra or {}, _UNSUPPORTED)
        embedder = Embedder(self._engine.model_config, body.dimensions)
        with renamed_params({"prompt": "input"}):
            async with Generation(self._engine, self._drafts(body, embedder, request[REQUEST_ID])) as generation:
                outputs = await generation.results()
        encode = _base64 if body.encoding_format == "base64" else _floats
        data = [
            {"object": "embedding", "index": index, "embedding": encode(embedder, output)}
            for index, output in enumerate(outputs)
        ]
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        answer = {"object": "list", "data": data, "model": self._engine.served_model_name, "usage": usage}
        return json_response(answer)

    def _drafts(self, body: EmbeddingRequest, embedder: Embedder, external_id: str) -> list[RequestDraft]:
        return [
            embedder.draft(
                prompt,
                add_special_tokens=body.add_special_tokens is not False,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
                external_id=external_id,
            )
            for prompt in parse_prompts(body.input, self._engine.config.scheduler.max_waiting_queue_len, "input")
        ]


def _floats(embedder: Embedder, output: RequestOutput) -> list[float]:
    numbers: list[float] = embedder.vector(output).tolist()
    return numbers


def _base64(embedder: Embedder, output: RequestOutput) -> str:
    """Of the numbers as float32, little-endian, as OpenAI has it."""
    return base64.b64encode(embedder.vector(output).astype("<f4").tobytes()).decode()
