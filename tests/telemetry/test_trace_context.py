"""The W3C ``traceparent`` of an HTTP request, on its way to the engine."""

from __future__ import annotations

import asyncio

import pytest

from ksana.types.request import RequestDraft
from ksana.types.trace_context import current_trace_context, valid_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (HEADER, HEADER),
        (f" {HEADER} ", HEADER),
        (f"01-{TRACE}-{SPAN}-01-more", f"01-{TRACE}-{SPAN}-01"),
        (f"00-{TRACE}-{SPAN}-01-more", ""),
        (f"ff-{TRACE}-{SPAN}-01", ""),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        (f"00-{TRACE}-{SPAN}", ""),
        (f"00-{TRACE}-{SPAN}-01\nforged", ""),
        ("", ""),
        ("x" * 10_000, ""),
    ],
)
def test_what_is_malformed_is_ignored(header: str, expected: str) -> None:
    assert valid_traceparent(header) == expected


def test_drafts_carry_the_context_they_are_made_in() -> None:
    async def handle(header: str) -> str:
        current_trace_context.set(header)
        await asyncio.sleep(0)
        return (await asyncio.to_thread(RequestDraft)).trace_context

    async def handle_two() -> list[str]:
        return await asyncio.gather(handle("a"), handle("b"))

    assert asyncio.run(handle_two()) == ["a", "b"]
    assert RequestDraft().trace_context == ""
