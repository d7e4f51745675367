"""LangChain's classes for OpenAI."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal

import pytest
from pydantic import BaseModel

langchain_openai = pytest.importorskip("langchain_openai", reason="needs Python 3.11")

QUESTION = "What is the capital of France?"


class Weather(BaseModel):
    """Tell the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def target(base_url: str) -> dict[str, Any]:
    return {"model": "ksana-llm", "base_url": base_url, "api_key": "none", "max_retries": 0}


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, target: dict[str, Any]) -> Any:
    """The chat model over either API."""
    return langchain_openai.ChatOpenAI(**target, temperature=0, max_tokens=60, use_responses_api=request.param)


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One for all tests: connections are kept for the next instance of the class too."""
    with closing(asyncio.new_event_loop()) as event_loop:
        yield event_loop


def test_whole_streamed_batched_and_asynchronous_answers_agree(chat: Any, loop: asyncio.AbstractEventLoop) -> None:
    whole = chat.invoke(QUESTION)
    assert "Paris" in whole.text
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.text for chunk in chat.stream(QUESTION)) == whole.text
    assert [answer.text for answer in chat.batch([QUESTION, QUESTION])] == [whole.text] * 2
    assert loop.run_until_complete(chat.ainvoke(QUESTION)).text == whole.text


@pytest.mark.parametrize("choice", ["any", "Weather"])
def test_bound_tools_are_called_and_their_results_read(chat: Any, choice: str) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    question = HumanMessage("What is the weather in Paris?")
    answer = chat.bind_tools([Weather], tool_choice=choice, parallel_tool_calls=False).invoke([question])
    [call] = answer.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    final = chat.invoke([question, answer, ToolMessage("sunny", tool_call_id=call["id"])])
    assert final.text


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_by_every_method(chat: Any, method: str) -> None:
    found = chat.with_structured_output(Weather, method=method).invoke("The weather in Rome for two days")
    assert isinstance(found, Weather)


def test_texts_and_embeddings(target: dict[str, Any]) -> None:
    text = langchain_openai.OpenAI(**target, temperature=0, max_tokens=6).invoke("The capital of France is")
    assert "Paris" in text
    # Otherwise it counts tokens by a table of OpenAI's, which it would have to fetch.
    embeddings = langchain_openai.OpenAIEmbeddings(**target, check_embedding_ctx_length=False)
    one, two = embeddings.embed_documents(["one", "two"])
    assert embeddings.embed_query("one") == pytest.approx(one, abs=1e-5)
    assert one != two
