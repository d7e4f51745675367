from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from ksana.testing.scripted_engine import ScriptedEngine

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

Opener = Callable[..., Page]

PATIENCE_MS = 20_000  # a busy machine takes its time
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


# Not for the session: while playwright runs, its event loop keeps all others out of this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"there is no browser on PATH; on Debian: apt install {BROWSERS[0]}")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=found) as browser:
        yield browser


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Open the page of a server. Whatever the browser complains about fails the test: a script, the content policy."""
    complaints: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:

        def open_page(url: str, *, width: int = 1280, refused: bool = False) -> Page:
            def complain(text: str) -> None:
                # The browser has a line of its own for every answer that refuses something.
                if not (refused and text.startswith("Failed to load resource")):
                    complaints.append(text)

            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.set_viewport_size({"width": width, "height": 740})
            page.on("console", lambda message: complain(message.text))
            page.on("pageerror", lambda error: complain(str(error)))
            page.goto(url)
            return page

        yield open_page
    assert complaints == []
