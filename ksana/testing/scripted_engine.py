"""An engine without a model, for the tests of frontends: it answers every request with the same text.

It has the interface of :class:`ksana.engine.async_engine.AsyncEngine` that frontends use, and knobs for what a real
engine does only by chance: a full queue, a failure half-way, a request that never ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from types import TracebackType

from ksana.errors import EngineDeadError, RequestError
from ksana.plugin.manager import KsanaPluginManager
from ksana.text.chat_template import ChatTemplate
from ksana.types.config import KsanaConfig
from ksana.types.model import ModelConfig, RopeConfig
from ksana.types.output import FinishReason, RequestOutput, RequestStats, TokenLogprobs
from ksana.types.request import RequestDraft
from ksana.types.sampling import SamplingParams
from ksana.types.stats import EngineSnapshot

_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_POLL_S = 0.002


class ByteTokenizer:
    """A :class:`ksana.text.tokenizer.Tokenizer` whose tokens are the bytes of UTF-8."""

    vocab_size = 256
    bos_token_id = eos_token_id = None
    bos_token = eos_token = ""
    special_token_ids: frozenset[int] = frozenset()
    is_byte_exact = True
    strips_leading_space = False

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of ``text``."""
        return list(text.encode())

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of those bytes."""
        return bytes(i for i in ids if 0 <= i < self.vocab_size).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One byte; none for an unknown id."""
        return bytes([token_id]) if 0 <= token_id < self.vocab_size else b""


class ScriptedEngine:
    """Answers with ``answer``, one byte a token.

    Attributes:
        token_interval_s: pause before every token.
        held: while True, requests wait for their first token.
        fail_after: number of tokens after which requests fail, with ``failure``; None: they do not.
        extra: what a postprocess plugin would have added to the last output.
        drafts: every draft that was submitted, the refused ones included.
        aborted: ids of requests that were left before their end.
    """

    def __init__(self, answer: str = "Hello, world!", *, max_model_len: int = 256, token_interval_s: float = 0) -> None:
        self.answer = answer
        self.max_model_len = max_model_len
        self.token_interval_s = token_interval_s
        self.held = False
        self.fail_after: int | None = None
        self.failure: RequestError | None = RequestError("the scripted failure", status=500, type="server_error")
        self.extra: dict[str, object] = {}
        self.is_alive = True
        self.config = KsanaConfig()
        self.served_model_name = "scripted"
        self.model_config = _model_config(max_model_len)
        self.chat_template = ChatTemplate(_TEMPLATE)
        self.tokenizer = ByteTokenizer()
        self.plugin_manager = KsanaPluginManager()
        self.drafts: list[RequestDraft] = []
        self.aborted: list[str] = []
        self.running: dict[str, ScriptedStream] = {}
        self._ids = itertools.count()

    async def submit(self, draft: RequestDraft) -> ScriptedStream:
        """Like :meth:`submit_all`, for one sequence."""
        [stream] = await self.submit_all(draft)
        return stream

    async def submit_all(self, draft: RequestDraft) -> list[ScriptedStream]:
        """Check the draft as a real engine does, and start its sequences."""
        self.drafts.append(draft)
        if not self.is_alive:
            raise EngineDeadError("the scripted engine is dead")
        return [self._start(draft) for _ in range(draft.sampling.num_sequences)]

    def _start(self, draft: RequestDraft) -> ScriptedStream:
        stream = ScriptedStream(self, f"r{next(self._ids)}", self._prompt_token_ids(draft), draft.sampling)
        self.running[stream.request_id] = stream
        return stream

    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self.running)

    def snapshot(self) -> EngineSnapshot:
        """An engine that has counted nothing but the requests at hand."""
        return EngineSnapshot(num_running=len(self.running))

    async def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self.running and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return not self.running

    async def abort_all(self) -> None:
        """End every request with ``abort``."""
        for stream in self.running.values():
            stream.told_to_abort = True

    async def stop(self, reason: str) -> None:
        """Die."""
        self.is_alive = False

    def _prompt_token_ids(self, draft: RequestDraft) -> list[int]:
        given = [draft.prompt is not None, draft.prompt_token_ids is not None, draft.messages is not None]
        if sum(given) != 1:
            raise RequestError("give one of prompt, prompt_token_ids and messages", param="prompt")
        if draft.prompt_token_ids is not None:
            for token_id in draft.prompt_token_ids:
                if not 0 <= token_id < self.model_config.vocab_size:
                    raise RequestError(f"token id {token_id} is out of range", param="prompt")
            token_ids = list(draft.prompt_token_ids)
        elif draft.messages is not None:
            token_ids = list(self.chat_template.render(draft.messages, **draft.chat_template_kwargs).encode())
        else:
            token_ids = list((draft.prompt or "").encode())
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if len(token_ids) >= self.max_model_len:
            raise RequestError("the prompt is too long", code="context_length_exceeded", param="prompt")
        return token_ids


class ScriptedStream:
    """One request; its answer is made while it is read."""

    def __init__(
        self, engine: ScriptedEngine, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.told_to_abort = False
        self._engine = engine
        self._sampling = sampling
        self._output = RequestOutput(
            request_id, prompt_token_ids, stats=RequestStats(num_prompt_tokens=len(prompt_token_ids))
        )

    async def __aenter__(self) -> ScriptedStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def abort(self) -> None:
        """Forget the request, if it still runs."""
        if self._engine.running.pop(self.request_id, None) is not None:
            self._engine.aborted.append(self.request_id)

    async def result(self) -> RequestOutput:
        """Wait for the last output."""
        async for output in self:
            if output.finished:
                return output
        raise AssertionError("a stream always has a last output")

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        tokens = list(self._engine.answer.encode())
        max_tokens = self._sampling.max_tokens
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        reason = FinishReason.STOP if limit == len(tokens) else FinishReason.LENGTH
        for number, token in enumerate(tokens[:limit]):
            if await self._wait() is FinishReason.ABORT:
                yield self._finish(FinishReason.ABORT)
                return
            if number == self._engine.fail_after:
                yield self._finish(FinishReason.ERROR, self._engine.failure)
                return
            yield self._advance(token)
        yield self._finish(reason)

    async def _wait(self) -> FinishReason | None:
        await asyncio.sleep(self._engine.token_interval_s)
        while True:
            if not self._engine.is_alive:
                raise EngineDeadError("the scripted engine has died")
            if self.told_to_abort:
                return FinishReason.ABORT
            if not self._engine.held:
                return None
            await asyncio.sleep(_POLL_S)

    def _advance(self, token: int) -> RequestOutput:
        done = self._output
        self._output = replace(
            done,
            token_ids_delta=[token],
            text_delta=chr(token),
            token_ids=[*done.token_ids, token],
            text=done.text + chr(token),
            logprobs=[*done.logprobs, *self._logprobs(token)],
        )
        return self._output

    def _logprobs(self, token: int) -> list[TokenLogprobs]:
        """The token is likely, and the ones behind it in the vocabulary less so."""
        count = self._sampling.logprobs
        if count is None:
            return []
        top = tuple(((token + rank) % ByteTokenizer.vocab_size, -0.25 * (rank + 1)) for rank in range(count))
        return [TokenLogprobs(token, -0.25, top)]

    def _finish(self, reason: FinishReason, error: RequestError | None = None) -> RequestOutput:
        self._engine.running.pop(self.request_id, None)
        extra = dict(self._engine.extra)
        return replace(self._output, token_ids_delta=[], text_delta="", finish_reason=reason, error=error, extra=extra)


def _model_config(max_model_len: int) -> ModelConfig:
    return ModelConfig(
        architecture="ScriptedForCausalLM",
        name="scripted-model",
        vocab_size=256,
        hidden_size=4,
        intermediate_size=4,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=4,
        max_model_len=max_model_len,
        dtype="float32",
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=True,
    )
