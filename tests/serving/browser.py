"""A real Chromium for tests of the page, and what it must never do: complain, or ask anybody but the server."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Playwright, expect

from .conftest import Server

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "the tests of the page need Chromium and there is none: install it (on Debian and Ubuntu: "
    "`apt-get install chromium`), or say where it is by MANYLORA_CHROMIUM"
)
PHONE = {"width": 360, "height": 740}


def launch(playwright: Playwright) -> Browser:
    given = os.environ.get("MANYLORA_CHROMIUM")
    found = given or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(MISSING, pytrace=False)
    # Chromium does not sandbox what root runs.
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"] if os.geteuid() == 0 else [])


@contextmanager
def opened(browser: Browser, url: str, *expected: str, **context: Any) -> Iterator[Page]:
    """A page that was opened; `expected`: words of console errors that belong to the test."""
    wrong: list[str] = []
    with browser.new_context(viewport=context.pop("viewport", {"width": 1280, "height": 900}), **context) as fresh:
        page = fresh.new_page()
        page.set_default_timeout(15_000)

        def complain(text: str) -> None:
            if not any(words in text for words in expected):
                wrong.append(text)

        page.on("console", lambda told: complain(told.text) if told.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complain(str(error)))
        origin = "/".join(url.split("/")[:3])
        page.on("request", lambda asked: None if asked.url.startswith(origin + "/") else complain(asked.url))
        page.goto(url)
        yield page
    assert wrong == []


def unfit_for_some(page: Page) -> list[str]:
    """What axe has to object to, from the least on."""
    found = Axe().run(page).response["violations"]
    return [f"{it['id']} ({it['impact']}): {node['html']}" for it in found for node in it["nodes"]]


def shelf(server: Server, key: str | None = None, known: str = "") -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    # A look serves for a quarter of a second.
    time.sleep(0.3)
    answer = server.client.get("/shelf", params={"known": known}, headers=headers)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def live(page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")


def button(page: Page, name: str) -> Any:
    return page.get_by_role("button", name=name, exact=True)


def focused(page: Page) -> str:
    name: str = page.evaluate("""() => {
        const it = document.activeElement;
        return it === document.body ? "" : it.id || it.getAttribute("aria-label") || it.name || it.textContent.trim();
    }""")
    return name


@contextmanager
def busy(server: Server, models: list[str], prompt: str) -> Iterator[None]:
    """Let a server have much to do."""
    stop = threading.Event()

    def ask(model: str) -> None:
        fields = {"model": model, "prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 3}
        while not stop.is_set():
            with server.client.stream("POST", "/v1/completions", json=fields | {"temperature": 1}) as answer:
                for _ in answer.iter_bytes():
                    if stop.is_set():
                        return

    threads = [threading.Thread(target=ask, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
