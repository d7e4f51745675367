"""The body of ``POST /forward``: the wire format of the original engine, as pydantic models."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, FailFast, Field

from ksana.server.input_embeddings import InputRefitEmbedding

TokenIds = Annotated[list[int] | None, FailFast()]
Slice = Annotated[list[int], Field(min_length=2, max_length=2)]


class RequestTarget(BaseModel):
    """What is wanted at which positions of a prompt. ``slice_pos`` includes both ends and counts back from the end."""

    model_config = ConfigDict(strict=True, extra="forbid")

    target_name: str | None = Field(None, description="transformer, layernorm or logits")
    slice_pos: Annotated[list[Slice] | None, FailFast()] = None
    token_id: TokenIds = None
    token_reduce_mode: str | None = Field(None, description="GATHER_ALL (the default) or GATHER_TOKEN_ID")
    input_top_logprobs_num: int | None = None
    cutoff_layer: TokenIds = None


class ForwardPrompt(BaseModel):
    """One prompt. Unknown fields are tolerated, as the original does."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    prompt: str | None = None
    input_tokens: TokenIds = None
    input_refit_embedding: InputRefitEmbedding | None = None
    request_target: Annotated[list[RequestTarget] | None, FailFast()] = None


class ForwardRequest(BaseModel):
    """The whole body."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    requests: Annotated[list[ForwardPrompt], FailFast(), Field(min_length=1)]
