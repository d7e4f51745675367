"""Which targets of ``/forward`` there are, and which of their fields go together."""

from __future__ import annotations

from typing import Literal

from ksana.errors import RequestError
from ksana.server.forward_request import RequestTarget
from ksana.types.sampling_checks import MAX_LOGPROBS

GATHER_ALL: Literal["GATHER_ALL"] = "GATHER_ALL"
GATHER_TOKEN_ID: Literal["GATHER_TOKEN_ID"] = "GATHER_TOKEN_ID"

_NAMES = ("transformer", "layernorm", "logits")
_RERANKER = "lm_head"


def check_target(target: RequestTarget, param: str) -> None:
    """Refuse what can be refused without the prompt.

    Args:
        param: where in the body the target is.

    Raises:
        RequestError: naming the field at fault.
    """
    _check_name(target, param)
    if target.cutoff_layer:
        raise _unsupported(f"{param}.cutoff_layer", "it is for layer-wise rerankers")
    if target.token_id and target.slice_pos:
        raise RequestError("token_id and slice_pos cannot be given at the same time", param=f"{param}.token_id")
    if target.token_id and target.target_name == "logits":
        raise RequestError("The target logits takes slice_pos, not token_id", param=f"{param}.token_id")
    _check_mode(target, param)
    _check_top(target, param)


def mode_of(target: RequestTarget) -> str:
    """The way in which rows are reduced."""
    return GATHER_ALL if target.token_reduce_mode is None else target.token_reduce_mode


def _check_name(target: RequestTarget, param: str) -> None:
    name = target.target_name
    if name is None:
        raise RequestError("Missing 'target_name'", param=f"{param}.target_name")
    if name == _RERANKER:
        raise _unsupported(f"{param}.target_name", f"{name} is for layer-wise rerankers")
    if name not in _NAMES:
        raise RequestError(
            f"Invalid target name {name!r}: it must be one of {', '.join(_NAMES)}", param=f"{param}.target_name"
        )


def _check_mode(target: RequestTarget, param: str) -> None:
    mode = mode_of(target)
    if mode not in (GATHER_ALL, GATHER_TOKEN_ID):
        raise RequestError(
            f"Invalid token_reduce_mode {mode!r}: it must be {GATHER_ALL} or {GATHER_TOKEN_ID}",
            param=f"{param}.token_reduce_mode",
        )
    if mode == GATHER_TOKEN_ID and target.target_name != "logits":
        raise RequestError(
            f"The target {target.target_name} does not support the token_reduce_mode {mode}, only logits does",
            param=f"{param}.token_reduce_mode",
        )


def _check_top(target: RequestTarget, param: str) -> None:
    top = target.input_top_logprobs_num or 0
    problem = None
    if not 0 <= top <= MAX_LOGPROBS:
        problem = f"must be from 0 to {MAX_LOGPROBS}, not {top}"
    elif top and mode_of(target) == GATHER_ALL:
        problem = f"needs the token_reduce_mode {GATHER_TOKEN_ID}"
    if problem:
        raise RequestError(f"input_top_logprobs_num {problem}", param=f"{param}.input_top_logprobs_num")


def _unsupported(param: str, reason: str) -> RequestError:
    return RequestError(
        f"{param} is not supported by this server: {reason}; leave it out", code="unsupported_parameter", param=param
    )
