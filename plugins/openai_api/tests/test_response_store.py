"""What is remembered of responses, for whom, and how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseItem
from pydantic import SecretStr, TypeAdapter

from ksana.config.compose import compose_config
from ksana.config.options import collect_options
from ksana.config.settings import Setting
from ksana.errors import RequestError, UsageError
from ksana.plugin.manager import KsanaPluginManager
from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.types.config import KsanaConfig, ServerConfig
from ksana_openai_api import plugin
from ksana_openai_api.responses.store import ResponseStore, StoredResponse

pytestmark = pytest.mark.timeout(30)

Connect = Callable[..., openai.OpenAI]


@pytest.fixture
def connect(engine: ScriptedEngine) -> Iterator[Callable[[KsanaConfig], Connect]]:
    """Start a server; the result makes clients of it, by their keys."""
    with ExitStack() as stack:

        def serve(config: KsanaConfig) -> Connect:
            base = stack.enter_context(live_server(engine, plugin, config=config))

            def client(key: str = "none") -> openai.OpenAI:
                return stack.enter_context(openai.OpenAI(base_url=f"{base}/v1", api_key=key, max_retries=0))

            return client

        yield serve


def test_a_response_can_be_read_again_and_forgotten(client: openai.OpenAI) -> None:
    response = client.responses.create(model="ksana-llm", input="Hi")
    assert client.responses.retrieve(response.id) == response
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError) as streamed:
        client.responses.retrieve(response.id, stream=True)
    assert streamed.value.param == "stream"
    client.responses.delete(response.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="ksana-llm", input="Hi", previous_response_id=response.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_only_what_shall_be_kept_is_kept(client: openai.OpenAI) -> None:
    response: Any = client.responses.create(model="ksana-llm", input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_input_items_come_a_page_at_a_time(client: openai.OpenAI) -> None:
    first = client.responses.create(model="ksana-llm", input=[{"role": "user", "content": f"{n}"} for n in range(4)])
    second = client.responses.create(model="ksana-llm", input="last", previous_response_id=first.id)
    listed = client.responses.input_items.list(second.id, limit=2)
    items: Any = list(listed)  # the client fetches the other pages
    assert [item.content[0].text for item in items] == ["last", "Hello, world!", "3", "2", "1", "0"]
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    for item in items:
        adapter.validate_python(item.to_dict())
    oldest: Any = client.responses.input_items.list(second.id, limit=3, order="asc").data
    assert [item.content[0].text for item in oldest] == ["0", "1", "2"]
    wrong: list[dict[str, Any]] = [{"limit": 0}, {"limit": 101}, {"limit": "x"}, {"order": "up"}, {"after": "msg_none"}]
    for query in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_items.list(second.id, **query)
        assert caught.value.param == next(iter(query))


def test_nobody_sees_the_responses_of_others(connect: Callable[[KsanaConfig], Connect]) -> None:
    client = connect(KsanaConfig(server=ServerConfig(api_keys=(SecretStr("a-key"), SecretStr("b-key")))))
    mine, others = client("a-key"), client("b-key")
    response = mine.responses.create(model="ksana-llm", input="Hi")
    assert mine.responses.retrieve(response.id) == response
    asks: list[Callable[[], object]] = [
        lambda: others.responses.retrieve(response.id),
        lambda: others.responses.delete(response.id),
        lambda: others.responses.input_items.list(response.id),
        lambda: others.responses.create(model="ksana-llm", input="Hi", previous_response_id=response.id),
    ]
    for ask in asks:
        with pytest.raises(openai.NotFoundError):
            ask()
    assert mine.responses.retrieve(response.id) == response


def test_a_server_that_keeps_nothing_says_so(connect: Callable[[KsanaConfig], Connect]) -> None:
    client = connect(KsanaConfig(plugin_options={"openai_api": {"response_store_size": 0}}))()
    response: Any = client.responses.create(model="ksana-llm", input="Hi")
    assert response.store is False
    with pytest.raises(openai.NotFoundError, match="keeps none"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="ksana-llm", input="Hi", store=True)
    assert caught.value.param == "store"


def test_the_options_bound_the_store() -> None:
    manager = KsanaPluginManager()
    manager.register(plugin, "openai_api")

    def configured(size: str) -> KsanaConfig:
        setting = Setting(size, "--response-store-size")
        path = ("plugin_options", "openai_api", "response_store_size")
        return compose_config(None, {}, {path: setting}, collect_options(manager)).config

    store = ResponseStore.of(configured("1"))
    for name in ("a", "b"):
        store.put("me", name, StoredResponse(b"{}", b"[]"))
    assert len(store) == 1
    with pytest.raises(UsageError, match="--response-store-size"):
        configured("-1")


OPERATION = st.tuples(st.sampled_from(["put", "get", "delete"]), st.sampled_from("xy"), st.integers(0, 5))


@given(st.integers(0, 4), st.integers(0, 4000), st.lists(st.tuples(OPERATION, st.integers(0, 2000)), max_size=30))
def test_the_store_never_outgrows_its_bounds(
    max_entries: int, max_bytes: int, operations: list[tuple[tuple[str, str, int], int]]
) -> None:
    """Against a list in the order of use: what is kept is the longest tail of it that fits."""
    store = ResponseStore(max_entries, max_bytes)
    used: list[tuple[tuple[str, str], StoredResponse]] = []
    for number, ((kind, owner, back), size) in enumerate(operations):
        if kind == "put":
            stored = StoredResponse(b"r" * size, b"")
            store.put(owner, f"id{number}", stored)
            if max_entries and stored.num_bytes <= max_bytes:
                used.append(((owner, f"id{number}"), stored))
                while len(used) > max_entries or sum(each.num_bytes for _, each in used) > max_bytes:
                    used.pop(0)
        else:
            key = (owner, f"id{number - back}")
            found = [entry for entry in used if entry[0] == key]
            if not found:
                with pytest.raises(RequestError):
                    getattr(store, kind)(*key)
                continue
            used.remove(found[0])
            if kind == "get":
                assert store.get(*key) is found[0][1]
                used.append(found[0])
            else:
                store.delete(*key)
        assert (len(store), store.num_bytes) == (len(used), sum(each.num_bytes for _, each in used))
