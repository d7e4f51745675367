"""What clients hear of whom the scheduler takes no request, or cannot end one."""

from __future__ import annotations

from ksana.errors import KsanaCode, RequestError
from ksana.kv.manager import KVCacheManager
from ksana.types.config import SchedulerConfig
from ksana.types.request import Request


def queue_full_error(config: SchedulerConfig) -> RequestError:
    """There is no place in the waiting queue."""
    return RequestError(
        f"the waiting queue is full ({config.max_waiting_queue_len} requests); try again later",
        status=429,
        type="rate_limit_error",
        code="queue_full",
        ksana_code=KsanaCode.QUEUE_FULL,
    )


def never_fits_error(request: Request, kv: KVCacheManager) -> RequestError:
    """The request needs more blocks than there are."""
    num_beams = request.sampling.num_beams
    beams = f" for each of {num_beams} beams" if num_beams > 1 else ""
    return RequestError(
        f"prompt and output of up to {request.max_total_tokens} tokens{beams} can never fit the KV cache of "
        f"{kv.num_usable_blocks} blocks of {kv.block_size} tokens",
        code="kv_capacity",
        ksana_code=KsanaCode.LENGTH_EXCEEDED,
    )


def too_many_beams_error(num_beams: int, limit: int) -> RequestError:
    """A search goes on with all beams in one step, or not at all."""
    return RequestError(f"num_beams is {num_beams}, but this server runs {limit} at a time", param="num_beams")


def waited_too_long_error(config: SchedulerConfig) -> RequestError:
    """The request has never run."""
    return RequestError(
        f"the request waited for more than {config.waiting_timeout_s:g} s",
        status=503,
        type="server_error",
        code="timeout",
        ksana_code=KsanaCode.TIMEOUT,
    )


def load_failed_error() -> RequestError:
    """Blocks of the request did not come, and the operator does not want them computed here."""
    return RequestError(
        "the keys and values of the prompt could not be loaded",
        status=500,
        type="server_error",
        code="kv_load_failed",
        ksana_code=KsanaCode.RUNTIME_FAILED,
    )


def no_token_left_error() -> RequestError:
    """Whatever could come next is banned."""
    return RequestError(
        "no token is left to go on with: the bad words, n-gram bans, min_tokens, grammar and plugins of this "
        "request ban every one",
        code="no_token_left",
    )
