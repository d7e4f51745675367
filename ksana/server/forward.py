"""``POST /forward``: hidden states, logits and probabilities of prompts, in the wire format of the original engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web

from ksana.errors import RequestError
from ksana.server.answer_budget import AnswerBudget
from ksana.server.body_format import BodyFormat, read_formatted
from ksana.server.errors import renamed_params
from ksana.server.forward_request import ForwardPrompt, ForwardRequest
from ksana.server.forward_targets import ForwardLimits, PromptTargets
from ksana.server.generation import Generation
from ksana.server.input_embeddings import InputRefitEmbedding, input_embeddings
from ksana.server.middlewares import REQUEST_ID
from ksana.server.native_errors import with_native_errors
from ksana.server.operations import describes
from ksana.server.streaming import send_whole
from ksana.types.output import RequestOutput
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams

if TYPE_CHECKING:
    from ksana.engine.async_engine import AsyncEngine

OK_MESSAGE, OK_CODE = "OK", 0


class ForwardHandler:
    """Serves ``POST /forward`` for one engine. The prompts of a call are computed in one batch, with all others'."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._budget = AnswerBudget()

    @describes("Hidden states, logits and probabilities of prompts, as JSON or MessagePack", request=ForwardRequest)
    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one call, in the format that it came in; errors are JSON."""
        return await with_native_errors(request, self._forward(request))

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        body, format = await read_formatted(request, ForwardRequest)
        self._check_count(len(body.requests))
        with self._budget.answer() as take, renamed_params(_param_names(body)):
            limits = ForwardLimits(self._engine.config.scheduler.max_num_seqs, take)
            targets = [
                PromptTargets(prompt.request_target or (), f"{path}.request_target", self._engine.model_config, limits)
                for path, prompt in _enumerate(body)
            ]
            drafts = [
                self._draft(path, prompt, own, request[REQUEST_ID])
                for (path, prompt), own in zip(_enumerate(body), targets, strict=True)
            ]
            async with Generation(self._engine, drafts) as generation:
                outputs = await generation.results()
            data = await asyncio.to_thread(_encode, format, targets, outputs)
            del outputs
            return await send_whole(request, data, format.content_type)

    def _check_count(self, count: int) -> None:
        most = self._engine.config.scheduler.max_waiting_queue_len
        if count > most:
            raise RequestError(
                f"{count} requests are more than the {most} that this server takes at once; send several calls",
                param="requests",
            )

    def _draft(self, path: str, prompt: ForwardPrompt, targets: PromptTargets, external_id: str) -> RequestDraft:
        if not prompt.input_tokens and prompt.prompt is None:
            raise RequestError(
                "Failed to decode the input prompt: give a prompt, or input_tokens", param=f"{path}.prompt"
            )
        refit = prompt.input_refit_embedding or InputRefitEmbedding()
        hidden_size = self._engine.model_config.hidden_size
        return RequestDraft(
            prompt=None if prompt.input_tokens else prompt.prompt,
            prompt_token_ids=prompt.input_tokens or None,
            sampling=SamplingParams(max_tokens=0),
            embeddings=input_embeddings(refit, hidden_size, f"{path}.input_refit_embedding"),
            captures=targets.plan,
            final_only=True,
            external_id=external_id,
        )


def _encode(format: BodyFormat, targets: list[PromptTargets], outputs: list[RequestOutput]) -> bytes:
    responses = [own.answer(output) for own, output in zip(targets, outputs, strict=True)]
    body: dict[str, Any] = {"responses": responses, "message": OK_MESSAGE, "code": OK_CODE}
    return format.dump(body)


def _enumerate(body: ForwardRequest) -> list[tuple[str, ForwardPrompt]]:
    """Every prompt with the place where it is."""
    return [(f"requests[{index}]", prompt) for index, prompt in enumerate(body.requests)]


def _param_names(body: ForwardRequest) -> dict[str, str]:
    """The engine speaks of the prompt; whose it is shows only if there is no other."""
    if len(body.requests) > 1:
        return {"prompt": "requests", "input_refit_embedding": "requests"}
    source = "input_tokens" if body.requests[0].input_tokens else "prompt"
    return {
        "prompt": f"requests[0].{source}",
        "input_refit_embedding": "requests[0].input_refit_embedding",
    }
