"""The options of the store of responses. Loads nothing: they are asked for by ``--help`` too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import NonNegativeInt

from ksana_openai_api.parser_options import OPTION_GROUP

if TYPE_CHECKING:
    from ksana.config.options import OptionRegistry

DEFAULT_SIZE = 1000
DEFAULT_BYTES = 64 * 2**20


def add_store_options(options: OptionRegistry) -> None:
    """Add the options that bound what is remembered."""
    options.add(
        OPTION_GROUP,
        "response_store_size",
        NonNegativeInt,
        default=DEFAULT_SIZE,
        help="responses that are remembered for previous_response_id; 0: none",
        flag="--response-store-size",
    )
    options.add(
        OPTION_GROUP,
        "response_store_bytes",
        NonNegativeInt,
        default=DEFAULT_BYTES,
        help="bytes that remembered responses and their conversations take at most, all together",
        flag="--response-store-bytes",
    )
