"""``POST /generate``, the native API, in the wire format of the original engine."""

from __future__ import annotations

import asyncio
import difflib
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from ksana.errors import RequestError
from ksana.server.errors import as_request_error, error_response, native_error_body, renamed_params
from ksana.server.generate_request import (
    UNSUPPORTED,
    UNSUPPORTED_SAMPLING,
    GenerateRequest,
    InputRefitEmbedding,
    SamplingConfig,
)
from ksana.server.generation import Generation
from ksana.server.json_body import parse_json, read_json
from ksana.server.json_response import json_response
from ksana.server.middlewares import REQUEST_ID
from ksana.server.streaming import Framing, JsonStream
from ksana.server.unsupported import refuse_unsupported
from ksana.types.output import RequestOutput
from ksana.types.request import InputEmbedding, RequestDraft
from ksana.types.sampling import SamplingParams

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

NUL_ENDED = Framing(
    content_type="application/octet-stream", prefix=b"", suffix=b"\0", terminator=b"", error_body=native_error_body
)
"""Every chunk is a whole JSON object that ends with a zero byte; the end of the stream has no mark of its own."""

_SAMPLING_PARAM_NAMES = {
    "max_tokens": "sampling_config.max_new_tokens",
    "top_k": "sampling_config.topk",
    "top_p": "sampling_config.topp",
    "stop": "sampling_config.stop_strings",
    **{name: f"sampling_config.{name}" for name in ("temperature", "min_p", "seed", "stop_token_ids", "logprobs")},
}
"""This API's names for what sampling parameters call otherwise."""


class GenerateHandler:
    """Serves ``POST /generate`` for one engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; errors carry the numeric status of the original beside the usual shape."""
        try:
            return await self._generate(request)
        except (asyncio.CancelledError, ConnectionError):
            raise
        except Exception as error:
            described = as_request_error(error, request[REQUEST_ID])
            return error_response(described, body=native_error_body(described))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, GenerateRequest)
        self._check_model(body.model_name)
        with renamed_params(_param_names(body)):
            draft = make_draft(body, hidden_size=self._engine.model_config.hidden_size)
            draft.external_id = request[REQUEST_ID]
            draft.final_only = body.stream is False
            async with Generation(self._engine, [draft]) as generation:
                if body.stream is False:
                    [output] = await generation.results()
                    return json_response(response_body(output))
                await generation.wait_for_first()
                return await _stream(request, generation)

    def _check_model(self, name: str | None) -> None:
        known = (self._engine.served_model_name, self._engine.model_config.name)
        if name and name not in known:
            raise RequestError(
                f"the model {name!r} does not exist; this server has {known[0]!r}",
                status=404,
                code="model_not_found",
                param="model_name",
            )


async def _stream(request: web.Request, generation: Generation) -> web.StreamResponse:
    async with JsonStream(request, NUL_ENDED) as stream:
        async for _, output in generation:
            await stream.send(response_body(output))
    return stream.response


def response_body(output: RequestOutput) -> dict[str, Any]:
    """The JSON object for ``output``: everything from the start, not only what is new."""
    body: dict[str, Any] = {
        "texts": [output.text],
        "output_token_ids": [output.token_ids],
        "logprobs": [[entry.as_pairs() for entry in output.logprobs]] if output.logprobs else [],
        "input_token_ids": output.prompt_token_ids,
    }
    if output.finish_reason is not None:
        body["finish_reasons"] = [output.finish_reason.value]
    if output.extra:
        body["extra"] = output.extra
    return body


def make_draft(body: GenerateRequest, *, hidden_size: int) -> RequestDraft:
    """Turn a body into a draft.

    Args:
        hidden_size: elements of an embedding row.

    Raises:
        RequestError: a field is wrong, or asks for what this version does not have.
    """
    refuse_unsupported(body.model_extra or {}, UNSUPPORTED)
    draft = RequestDraft(
        prompt=body.prompt,
        prompt_token_ids=body.input_tokens,
        messages=body.messages,
        sampling=make_sampling_params(body.sampling_config),
        embeddings=_embeddings(body, hidden_size),
        additional_params=body.additional_params or {},
    )
    if body.use_chat_template and body.prompt is not None:
        draft.prompt, draft.messages = None, _parse_messages(body.prompt)
    if body.sampling_config.enable_thinking is not None:
        draft.chat_template_kwargs["enable_thinking"] = body.sampling_config.enable_thinking
    return draft


def make_sampling_params(config: SamplingConfig) -> SamplingParams:
    """Greedy by default, as the original: sampling needs a ``topk`` other than 1 and no ``do_sample: false``."""
    extra = config.model_extra or {}
    refuse_unsupported(extra, UNSUPPORTED_SAMPLING, prefix="sampling_config.")
    _refuse_unknown(extra)
    top_k = 1 if config.topk is None else config.topk
    greedy = config.do_sample is False or top_k == 1 or config.temperature == 0
    unlimited = config.max_new_tokens in (None, -1)
    return SamplingParams(
        max_tokens=None if unlimited else config.max_new_tokens,
        temperature=0.0 if greedy else _value_or(config.temperature, 1.0),
        top_k=1 if greedy else top_k,
        top_p=_value_or(config.topp, 1.0),
        min_p=_value_or(config.min_p, 0.0),
        seed=config.seed,
        stop=tuple(config.stop_strings or ()),
        stop_token_ids=tuple(config.stop_token_ids or ()),
        ignore_eos=bool(config.ignore_eos),
        include_stop_str_in_output=bool(config.include_stop_str_in_output),
        skip_special_tokens=config.skip_special_tokens is not False,
        logprobs=config.logprobs or 0,
    )


def _param_names(body: GenerateRequest) -> dict[str, str]:
    """The engine speaks of the prompt, whatever it was made from."""
    source = next((name for name in ("input_tokens", "messages") if getattr(body, name) is not None), "prompt")
    return {"prompt": source, **_SAMPLING_PARAM_NAMES}


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse_unknown(extra: dict[str, Any]) -> None:
    for name in extra:
        if name in UNSUPPORTED_SAMPLING:
            continue
        close = difflib.get_close_matches(name, SamplingConfig.model_fields, n=1)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        raise RequestError(
            f"unknown sampling option {name!r}{advice}", code="unknown_parameter", param=f"sampling_config.{name}"
        )


def _parse_messages(prompt: str) -> list[dict[str, Any]]:
    """With ``use_chat_template`` the prompt is a JSON list of messages."""
    try:
        messages = parse_json(prompt.encode())
    except RequestError:
        messages = None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RequestError(
            "with use_chat_template the prompt must be a JSON list of messages, for example "
            '"[{\\"role\\": \\"user\\", \\"content\\": \\"Hello\\"}]"',
            param="prompt",
        )
    return messages


def _embeddings(body: GenerateRequest, hidden_size: int) -> list[InputEmbedding]:
    param = "input_refit_embedding"
    refit = body.input_refit_embedding or InputRefitEmbedding(pos=body.pos, embeddings=body.embeddings)
    positions, embeddings = refit.pos or [], refit.embeddings or []
    if len(positions) != len(embeddings):
        raise RequestError(
            f"{param} has {len(positions)} positions for {len(embeddings)} embeddings; there must be one each",
            param=param,
        )
    return [
        _embedding(index, position, rows, hidden_size)
        for index, (position, rows) in enumerate(zip(positions, embeddings, strict=True))
    ]


def _embedding(index: int, position: int, rows: list[Any], hidden_size: int) -> InputEmbedding:
    param = f"input_refit_embedding.embeddings[{index}]"
    if position < 0:
        raise RequestError(f"position {position} is negative", param=f"input_refit_embedding.pos[{index}]")
    try:
        given = np.asarray(rows)
    except ValueError:
        raise RequestError(f"{param}: the rows differ in length", param=param) from None
    fits = given.ndim == 1 or (given.ndim == 2 and given.shape[1] == hidden_size)
    if given.dtype.kind not in "iuf" or given.size == 0 or given.size % hidden_size or not fits:
        raise RequestError(f"{param} must be rows of {hidden_size} numbers, the model's hidden size", param=param)
    with np.errstate(over="ignore"):
        array = given.astype(np.float32)
    if not np.isfinite(array).all():
        raise RequestError(f"{param} has numbers beyond the range of float32", param=param)
    return InputEmbedding(position, array.reshape(-1, hidden_size))
