"""``POST /generate``, the native API, in the wire format of the original engine."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.errors import native_error_body, renamed_params
from ksana.server.generate_request import (
    UNSUPPORTED,
    GenerateRequest,
    SamplingConfig,
)
from ksana.server.generation import Generation
from ksana.server.input_embeddings import InputRefitEmbedding, input_embeddings
from ksana.server.json_body import parse_json, read_json
from ksana.server.json_response import json_response
from ksana.server.logit_bias import parse_logit_bias
from ksana.server.middlewares import REQUEST_ID
from ksana.server.native_errors import with_native_errors
from ksana.server.operations import describes
from ksana.server.streaming import Framing, JsonStream
from ksana.server.structured_output import grammar_of, grammar_param, grammar_start
from ksana.server.unsupported import refuse_unsupported
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

NUL_ENDED = Framing(
    content_type="application/octet-stream", prefix=b"", suffix=b"\0", terminator=b"", error_body=native_error_body
)
"""Every chunk is a whole JSON object that ends with a zero byte; the end of the stream has no mark of its own."""

_OWN_NAMES = {
    "max_tokens": "max_new_tokens",
    "top_k": "topk",
    "top_p": "topp",
    "stop": "stop_strings",
    "prompt_logprobs": "input_top_logprobs_num",
    "n": "num_return_sequences",
}
"""This API's names for what sampling parameters call otherwise."""

_SAMPLING_PARAM_NAMES = {f.name: f"sampling_config.{_OWN_NAMES.get(f.name, f.name)}" for f in fields(SamplingParams)}
"""Where in the body the sampling parameters are."""


class GenerateHandler:
    """Serves ``POST /generate`` for one engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    @describes(
        "Continue a prompt, in the wire format of KsanaLLM", request=GenerateRequest, stream=NUL_ENDED.content_type
    )
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; errors carry the numeric status of the original beside the usual shape."""
        return await with_native_errors(request, self._generate(request))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await read_json(request, GenerateRequest)
        self._check_model(body.model_name)
        with renamed_params(_param_names(body)):
            draft = make_draft(body, hidden_size=self._engine.model_config.hidden_size)
            self._set_grammar(draft, body)
            draft.external_id = request[REQUEST_ID]
            draft.final_only = body.stream is False
            async with Generation(self._engine, [draft]) as generation:
                if body.stream is False:
                    return json_response(response_body(await generation.results()))
                await generation.wait_for_first()
                return await _stream(request, generation)

    def _set_grammar(self, draft: RequestDraft, body: GenerateRequest) -> None:
        grammar = grammar_of(body)
        if grammar is not None:
            start = grammar_start(body, self._engine.tokenizer)
            draft.sampling = replace(draft.sampling, grammar=grammar, grammar_after=start)

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
    latest = [RequestOutput(stream.request_id, stream.prompt_token_ids) for stream in generation.streams]
    async with JsonStream(request, NUL_ENDED) as stream:
        async for index, output in generation:
            latest[index] = output
            await stream.send(response_body(latest))
    return stream.response


def response_body(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The JSON object for the sequences of a prompt: everything from the start, not only what is new."""
    logprobs = [[entry.as_pairs() for entry in output.logprobs] for output in outputs]
    body: dict[str, Any] = {
        "texts": [output.text for output in outputs],
        "output_token_ids": [output.token_ids for output in outputs],
        "logprobs": logprobs if any(logprobs) else [],
        "input_token_ids": outputs[0].prompt_token_ids,
    }
    reasons = [output.finish_reason and output.finish_reason.value for output in outputs]
    if any(reasons):
        body["finish_reasons"] = reasons
    extras = [output.extra for output in outputs]
    if any(extras):
        body["extra"] = extras if len(extras) > 1 else extras[0]
    return body


def make_draft(body: GenerateRequest, *, hidden_size: int) -> RequestDraft:
    """Turn a body into a draft.

    Args:
        hidden_size: elements of an embedding row.

    Raises:
        RequestError: a field is wrong, or asks for what this version does not have.
    """
    refuse_unsupported(body.model_extra or {}, UNSUPPORTED)
    refit = body.input_refit_embedding or InputRefitEmbedding(pos=body.pos, embeddings=body.embeddings)
    draft = RequestDraft(
        prompt=body.prompt,
        prompt_token_ids=body.input_tokens,
        messages=body.messages,
        sampling=make_sampling_params(body.sampling_config),
        embeddings=input_embeddings(refit, hidden_size),
        additional_params=body.additional_params or {},
    )
    if body.use_chat_template and body.prompt is not None:
        draft.prompt, draft.messages = None, _parse_messages(body.prompt)
    if body.sampling_config.enable_thinking is not None:
        draft.chat_template_kwargs["enable_thinking"] = body.sampling_config.enable_thinking
    return draft


def make_sampling_params(config: SamplingConfig) -> SamplingParams:
    """Greedy by default, as the original: sampling needs a ``topk`` other than 1 and no ``do_sample: false``."""
    _refuse_unknown(config.model_extra or {})
    top_k = 1 if config.topk is None else config.topk
    greedy = config.do_sample is False or top_k == 1 or config.temperature == 0
    unlimited = config.max_new_tokens in (None, -1)
    num_beams = 1 if config.num_beams is None else config.num_beams
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
        logprobs=config.logprobs or None,
        prompt_logprobs=config.input_top_logprobs_num or None,
        min_tokens=config.min_tokens or 0,
        repetition_penalty=_value_or(config.repetition_penalty, 1.0),
        presence_penalty=_value_or(config.presence_penalty, 0.0),
        frequency_penalty=_value_or(config.frequency_penalty, 0.0),
        no_repeat_ngram_size=config.no_repeat_ngram_size or 0,
        encoder_no_repeat_ngram_size=config.encoder_no_repeat_ngram_size or 0,
        decoder_no_repeat_ngram_size=config.decoder_no_repeat_ngram_size or 0,
        logit_bias=parse_logit_bias(config.logit_bias),
        bad_words=tuple(config.bad_words or ()),
        # The original returns every beam, unless it is told how many.
        n=max(1, num_beams) if config.num_return_sequences is None else config.num_return_sequences,
        num_beams=num_beams,
        length_penalty=_value_or(config.length_penalty, 1.0),
        early_stopping=False if config.early_stopping is None else config.early_stopping,
    )


def _param_names(body: GenerateRequest) -> dict[str, str]:
    """The engine speaks of the prompt, whatever it was made from."""
    source = next((name for name in ("input_tokens", "messages") if getattr(body, name) is not None), "prompt")
    return {"prompt": source, **_SAMPLING_PARAM_NAMES, "grammar": grammar_param(body)}


def _value_or(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse_unknown(extra: dict[str, Any]) -> None:
    for name in extra:
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
