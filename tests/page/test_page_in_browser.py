"""The page in a real browser, on the demo model where the text matters, on a scripted engine where faults do."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from pydantic import SecretStr

from ksana.builtins import page as page_plugin
from ksana.engine.async_engine import AsyncEngine
from ksana.plugin.spec import PluginSpecs, create_plugin_manager
from ksana.testing.live_server import live_server
from ksana.testing.scripted_engine import ScriptedEngine
from ksana.testing.waiting import wait_until
from ksana.types.config import CacheConfig, KernelConfig, KsanaConfig, ModelOptions, ServerConfig
from ksana_openai_api import plugin as openai_api

Opener = Callable[..., Page]

PLUGINS = (page_plugin, openai_api)


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[AsyncEngine]:
    config = KsanaConfig(
        model=ModelOptions(model="demo"), cache=CacheConfig(num_blocks=200), kernel=KernelConfig(threads=1)
    )
    engine = AsyncEngine.start(config, create_plugin_manager(PluginSpecs(autoload=False)))
    yield engine
    asyncio.run(engine.stop("the tests are done"))


@pytest.fixture(scope="module")
def demo_url(demo_engine: AsyncEngine, browser: object) -> Iterator[str]:
    # The browser is named so that it ends first: while playwright runs, asyncio.run has no place in this thread.
    with live_server(demo_engine, *PLUGINS) as url:
        yield url


def ask(page: Page, question: str) -> None:
    page.get_by_label("Message", exact=True).fill(question)
    page.keyboard.press("Enter")


def finished_answer(page: Page, number: int = 0) -> str:
    answer = page.locator(".answer").nth(number)
    expect(answer).not_to_have_attribute("aria-busy", "true")
    return answer.locator("> .text").inner_text()


def no_sideways_scroll(page: Page) -> bool:
    width = "Math.max(document.documentElement.scrollWidth, document.querySelector('#log').scrollWidth)"
    return bool(page.evaluate(f"{width} <= innerWidth"))


def test_the_next_question_builds_on_the_answer(demo_url: str, open_page: Opener) -> None:
    page = open_page(demo_url)
    bodies: list[Any] = []
    page.on("request", lambda request: bodies.append(request.post_data_json) if request.method == "POST" else None)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("System prompt").fill("You are a helpful assistant.")
    ask(page, "What is the capital of France?")
    assert "Paris" in finished_answer(page)
    expect(page.locator(".answer footer")).to_contain_text(re.compile(r"\d+ tokens · \d+\.\d tokens/s · first after"))
    ask(page, "And of Italy?")
    finished_answer(page, 1)
    assert [message["role"] for message in bodies[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert "Paris" in bodies[1]["messages"][2]["content"]
    assert (bodies[1]["temperature"], bodies[1]["max_tokens"], "seed" in bodies[1]) == (0, 512, False)


def test_an_answer_streams_in_and_stop_ends_it_and_keeps_the_text(
    demo_url: str, demo_engine: AsyncEngine, open_page: Opener
) -> None:
    page = open_page(demo_url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("2000")
    ask(page, "Write a very long story about a river, in many chapters.")
    expect(page.locator(".answer > .text")).to_have_text(re.compile(r".{20}"))
    page.get_by_role("button", name="Stop").click()
    assert finished_answer(page)
    expect(page.locator(".answer footer")).to_contain_text("stopped")
    expect(page.locator("#running")).to_have_text("0")
    wait_until(lambda: demo_engine.num_unfinished() == 0)  # the page may not have seen the request at all yet
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_the_live_view_follows_the_engine(demo_url: str, demo_engine: AsyncEngine, open_page: Opener) -> None:
    page = open_page(demo_url)
    expect(page.locator("#link")).to_have_text("live")
    before = demo_engine.snapshot().num_steps
    page.get_by_label("Max tokens").fill("2000")
    ask(page, "Write a very long story about a mountain, in many chapters.")
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#blocks")).to_have_attribute("aria-label", re.compile(r"^[1-9]\d* blocks used"))
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]"))
    expect(page.locator("#steps .decode")).to_have_attribute("d", re.compile(r"^(M[\d.]+ 56h3v[\d.]+h-3z)+$"))
    page.hover("#steps", position={"x": page.locator("#steps").bounding_box()["width"] - 2, "y": 20})  # type: ignore[index]
    expect(page.locator("#step-note")).to_have_text(re.compile(r"\d+ \+ \d+ tokens of 1 in [\d.]+ ms"))
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#running")).to_have_text("0")
    assert demo_engine.snapshot().num_steps > before


def test_tokens_show_how_probable_they_were(demo_url: str, open_page: Opener) -> None:
    page = open_page(demo_url)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("20")
    page.get_by_label("Show probabilities of tokens").check()
    ask(page, "What is the capital of France?")
    assert "Paris" in finished_answer(page)
    tokens = page.locator(".token")
    tooltip = page.get_by_role("tooltip")
    tokens.nth(1).hover()
    expect(tooltip.locator("p")).to_have_count(5)
    # Greedy: the chosen one is the most probable one.
    expect(tooltip.locator("p").first).to_have_class("chosen")
    expect(tooltip.locator("p").first).to_contain_text(re.compile(r"\d+\.\d %"))
    tokens.first.focus()
    first = tooltip.inner_text()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    assert tooltip.inner_text() != first
    page.keyboard.press("Escape")
    expect(tooltip).to_be_hidden()


def test_a_phone_needs_no_sideways_scrolling(engine: ScriptedEngine, open_page: Opener) -> None:
    engine.answer = f"{'long' * 60}\n\n```\n{'code ' * 60}\n```\n"
    engine.max_model_len = 2000
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url, width=360)
        assert no_sideways_scroll(page)
        ask(page, "word" * 60)
        finished_answer(page)
        assert no_sideways_scroll(page)
        expect(page.locator("#panel")).to_be_hidden()
        page.get_by_role("button", name="Engine").click()
        expect(page.locator("#panel")).to_be_visible()
        assert no_sideways_scroll(page)
        page.keyboard.press("Escape")
        expect(page.locator("#panel")).to_be_hidden()
        expect(page.get_by_role("button", name="Engine")).to_be_focused()


def test_text_never_becomes_markup(engine: ScriptedEngine, open_page: Opener) -> None:
    engine.answer = (
        "<img src=x onerror=alert(1)> **bold <b>** `<i>`\n\n# <u>\n\n```html\n<script>alert(1)</script>\n```"
    )
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url)
        ask(page, "<script>alert(2)</script>")
        assert "<img src=x onerror=alert(1)> bold <b> <i>" in finished_answer(page)
        assert page.locator("#log").locator("img, b, i, u, script").count() == 0
        assert page.locator(".text strong, .text h3, .text pre").all_inner_texts() == [
            *("bold <b>", "<u>"),
            "<script>alert(1)</script>",
        ]


def test_a_key_is_asked_for_once_and_used_for_everything(engine: ScriptedEngine, open_page: Opener) -> None:
    config = KsanaConfig(server=ServerConfig(api_keys=(SecretStr("open-sesame"),)))
    with live_server(engine, *PLUGINS, config=config) as url:
        page = open_page(url, refused=True)
        dialog = page.get_by_role("dialog")
        page.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_be_visible()
        page.get_by_label("API key", exact=True).fill("open-sesame")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#link")).to_have_text("live")
        ask(page, "Hello")
        assert finished_answer(page) == engine.answer
        assert page.evaluate("sessionStorage.length + localStorage.length") == 1


def test_without_a_key_the_page_says_what_is_missing(engine: ScriptedEngine, open_page: Opener) -> None:
    config = KsanaConfig(server=ServerConfig(api_keys=(SecretStr("open-sesame"),)))
    with live_server(engine, *PLUGINS, config=config) as url:
        page = open_page(url, refused=True)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#link")).to_have_text("needs a key")
        ask(page, "Hello")
        page.get_by_role("dialog").press("Escape")
        expect(page.locator(".error")).to_have_text("This server asks for an API key.")


def test_a_refusal_is_shown_and_the_conversation_goes_on(engine: ScriptedEngine, open_page: Opener) -> None:
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url, refused=True)
        ask(page, "too long " * 100)
        finished_answer(page)
        expect(page.locator(".error")).to_contain_text("the prompt is too long")
        ask(page, "Hello")
        assert finished_answer(page, 1) == engine.answer
        # A question without an answer is not part of the conversation.
        assert engine.drafts[-1].messages == [{"role": "user", "content": "Hello"}]


def test_a_wrong_setting_is_shown_and_the_question_kept(engine: ScriptedEngine, open_page: Opener) -> None:
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url, width=360)
        page.get_by_role("button", name="Engine").click()
        page.get_by_label("Max tokens").fill("0")
        page.keyboard.press("Escape")
        ask(page, "Hello")
        expect(page.get_by_label("Max tokens")).to_be_focused()
        page.get_by_label("Max tokens").fill("5")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Send").click()
        assert finished_answer(page) == engine.answer[:5]
        expect(page.locator(".answer footer")).to_contain_text("cut at max tokens")


def test_a_failure_half_way_keeps_the_text_and_can_be_tried_again(engine: ScriptedEngine, open_page: Opener) -> None:
    engine.fail_after = 5
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url)
        ask(page, "Hello")
        assert finished_answer(page) == engine.answer[:5]
        expect(page.locator(".error")).to_have_text("the scripted failure")
        engine.fail_after = None
        page.get_by_role("button", name="Again").click()
        assert finished_answer(page) == engine.answer
        expect(page.locator(".error")).to_have_count(0)
        expect(page.locator(".question")).to_have_text(["Hello"])


def test_a_server_that_is_gone_is_told_and_found_again(engine: ScriptedEngine, open_page: Opener) -> None:
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url, refused=True)
        expect(page.locator("#link")).to_have_text("live")
        page.route("**/*", lambda route: route.abort())
        ask(page, "Hello")
        finished_answer(page)
        expect(page.locator(".error")).to_have_text("The server cannot be reached.")
        engine.is_alive = False
        expect(page.locator("#link")).to_have_text("not connected")
        engine.is_alive = True
        page.unroute("**/*")
        expect(page.locator("#link")).to_have_text("live")


def test_a_model_without_a_chat_template_goes_on_with_the_text(engine: ScriptedEngine, open_page: Opener) -> None:
    engine.chat_template = None  # type: ignore[assignment]
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url)
        expect(page.locator("#hint")).to_contain_text("no chat template")
        ask(page, "Once upon a time")
        assert finished_answer(page) == engine.answer
        ask(page, "And then")
        finished_answer(page, 1)
        assert engine.drafts[-1].prompt == f"Once upon a time{engine.answer}\nAnd then"
        expect(page.get_by_label("Show probabilities of tokens")).to_be_disabled()


def test_reasoning_is_folded_away(engine: ScriptedEngine, open_page: Opener) -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "Hm, "}, {"reasoning_content": "well."}]
    chunks = [{"choices": [{"delta": delta}]} for delta in (*deltas, {"content": "Yes."})]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url)
        page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))
        ask(page, "Is it?")
        assert finished_answer(page) == "Yes."
        expect(page.get_by_text("Hm, well.")).to_be_hidden()
        page.get_by_text("Reasoning", exact=True).click()
        expect(page.get_by_text("Hm, well.")).to_be_visible()


def test_a_new_chat_forgets_the_old_one_and_ends_its_request(engine: ScriptedEngine, open_page: Opener) -> None:
    with live_server(engine, *PLUGINS) as url:
        page = open_page(url)
        ask(page, "Hello")
        finished_answer(page)
        engine.held = True
        ask(page, "Again")
        expect(page.get_by_role("button", name="Stop")).to_be_visible()
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("#welcome")).to_be_visible()
        expect(page.locator("article")).to_have_count(0)
        expect(page.locator("#running")).to_have_text("0")
        engine.held = False
        page.get_by_role("button", name="What is the capital of France?").click()
        assert finished_answer(page) == engine.answer
        assert [len(draft.messages or ()) for draft in engine.drafts] == [1, 3, 1]
