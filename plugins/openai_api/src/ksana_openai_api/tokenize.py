"""``POST /tokenize`` and ``POST /detokenize``, with the bodies that vLLM has for them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, FailFast

from ksana.errors import RequestError
from ksana.server.json_body import read_json
from ksana.server.json_response import dump_json
from ksana.server.operations import describes
from ksana.server.unsupported import NeutralValues, refuse_unsupported
from ksana_openai_api.models import check_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from ksana.engine.async_engine import AsyncEngine
    from ksana.text.tokenizer import Tokenizer

MAX_WAITING = 64
"""Texts that may wait for the thread; more are refused, since each of them is held in memory."""

_INLINE_SIZE = 2048
"""Characters, or token ids, that take so little time that the event loop does not notice."""

_UNSUPPORTED: NeutralValues = {
    "chat_template": (),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
}


class TokenizeRequest(BaseModel):
    """A text, or messages to be rendered by the model's chat template first."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    tools: Annotated[list[dict[str, Any]] | None, FailFast()] = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


@dataclass(frozen=True, slots=True)
class TokenizeAnswer:
    """The tokens of a text.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        token_strs: the text of each token, if it was asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(BaseModel):
    """Token ids to be turned into text."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


@dataclass(frozen=True, slots=True)
class DetokenizeAnswer:
    """The text of the tokens, special ones included."""

    prompt: str


class Tokenization:
    """Serves both routes for one engine. Whatever is long goes to one thread, in turn."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._executor = ThreadPoolExecutor(1, "ksana-tokenize")
        self._num_waiting = 0

    async def close(self, app: web.Application) -> None:
        """Signal handler for ``on_cleanup``: forget what waits."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    @describes("Turn a text or messages into tokens", request=TokenizeRequest, response=TokenizeAnswer)
    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer with the tokens of a text; preprocess plugins do not see it."""
        body = await read_json(request, TokenizeRequest)
        check_model(self._engine, body.model)
        refuse_unsupported(body.model_extra or {}, _UNSUPPORTED)
        size = len(body.prompt or "") + sum(len(str(message)) for message in body.messages or ())
        return await self._run(size, lambda: self._tokenize(body))

    @describes("Turn tokens into text", request=DetokenizeRequest, response=DetokenizeAnswer)
    async def detokenize(self, request: web.Request) -> web.Response:
        """Answer with the text of token ids."""
        body = await read_json(request, DetokenizeRequest)
        check_model(self._engine, body.model)
        return await self._run(len(body.tokens), lambda: self._detokenize(body.tokens))

    def _tokenize(self, body: TokenizeRequest) -> TokenizeAnswer:
        tokenizer = self._engine.tokenizer
        text = self._text_of(body)
        # A template has written the special tokens itself.
        add_special_tokens = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
        tokens = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        strings = [_text_of_token(tokenizer, token) for token in tokens] if body.return_token_strs else None
        return TokenizeAnswer(len(tokens), self._engine.max_model_len, tokens, strings)

    def _text_of(self, body: TokenizeRequest) -> str:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if body.prompt is not None:
            return body.prompt
        template = self._engine.chat_template
        if template is None:
            raise RequestError("this model has no chat template; send a prompt instead of messages", param="messages")
        variables = dict(body.chat_template_kwargs or {})
        if body.tools:
            variables["tools"] = body.tools
        if body.add_generation_prompt is not None:
            variables["add_generation_prompt"] = body.add_generation_prompt
        return template.render(body.messages or (), **variables)

    def _detokenize(self, tokens: list[int]) -> DetokenizeAnswer:
        vocab_size = self._engine.model_config.vocab_size
        for index, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                param = f"tokens[{index}]"
                raise RequestError(f"{param} must be a token id, from 0 to {vocab_size - 1}", param=param)
        return DetokenizeAnswer(self._engine.tokenizer.decode(tokens, skip_special_tokens=False))

    async def _run(self, size: int, work: Callable[[], TokenizeAnswer | DetokenizeAnswer]) -> web.Response:
        """Do ``work``, here or in the thread, and encode the answer in the same place."""
        if size <= _INLINE_SIZE:
            return _json(dump_json(work()))
        if self._num_waiting >= MAX_WAITING:
            raise RequestError(
                "too many long texts wait to be tokenised; try again later",
                status=429,
                type="rate_limit_error",
                code="too_many_requests",
            )
        self._num_waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return _json(await loop.run_in_executor(self._executor, lambda: dump_json(work())))
        finally:
            self._num_waiting -= 1


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _text_of_token(tokenizer: Tokenizer, token: int) -> str:
    data = tokenizer.token_bytes(token)
    return tokenizer.decode([token], skip_special_tokens=False) if data is None else data.decode(errors="replace")
