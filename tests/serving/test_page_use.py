"""What is done on the page: asking side by side, keys, loading and unloading; and its pictures for the docs."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from .browser import PHONE, busy, button, focused, live, opened, shelf
from .conftest import ADAPTERS, ORACLE, Server, StartServer

ON = {"MANYLORA_ALLOW_RUNTIME_LORA_UPDATING": "1"}
# A folder: where pictures for the docs are wanted.
SCREENSHOTS = os.environ.get("MANYLORA_SCREENSHOTS")
OPEN = "Give a key by the button Keys."


def test_the_playground_asks_the_base_and_adapters_side_by_side(browser: Browser, fleet: Server) -> None:
    prompt = "List all customers."
    fields: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": False}
    with opened(browser, fleet.url) as page:
        live(page)
        button(page, "Compare alpha").click()
        button(page, "Compare beta").click()
        page.get_by_label("completion").check()
        page.get_by_label("Prompt").fill(prompt)
        page.get_by_label("max_tokens").fill("24")
        answers = page.locator(".answer")

        def told() -> dict[str, str]:
            for state in page.locator(".answer .state").all():
                expect(state).to_contain_text("ended by")
            texts = page.locator(".answer pre").all_text_contents()
            return dict(zip(page.locator(".answer .name").all_text_contents(), texts, strict=True))

        button(page, "Send").click()
        expect(answers).to_have_count(3)
        plain = told()
        assert plain == {name: fleet.text(name, **fields) for name in ("base", "alpha", "beta")}
        assert len(set(plain.values())) == 3
        expect(page.locator("#said")).to_contain_text("alpha: ")
        # The strength is that of adapters; 0 is the base.
        page.get_by_label("lora_scale").fill("0")
        button(page, "Send").click()
        expect(page.locator("#said")).to_contain_text("beta: ")
        assert set(told().values()) == {plain["base"]}
        page.get_by_label("lora_scale").fill("1")
        page.get_by_label("chat").check()
        page.get_by_label("base", exact=True).uncheck()
        button(page, "No longer compare beta").click()
        button(page, "Send").click()
        expect(answers).to_have_count(1)
        messages = [{"role": "user", "content": prompt}]
        body = {"model": "alpha", "messages": messages, "max_tokens": 24, "temperature": 0}
        assert told() == {"alpha": fleet.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]}


def test_stop_ends_what_runs_and_errors_are_told(browser: Browser, fleet: Server) -> None:
    with opened(browser, fleet.url, "400 (Bad Request)") as page:
        live(page)
        # Slow enough to be stopped: the answer's bytes are held back once it has begun.
        page.evaluate("""() => {
            const real = window.fetch;
            window.fetch = async (address, options) => {
                const answer = await real(address, options);
                if (!String(address).includes("completions") || !answer.ok) return answer;
                const first = (await answer.clone().text()).split("\\n\\n")[0] + "\\n\\n";
                const held = new ReadableStream({
                    start: (control) => {
                        control.enqueue(new TextEncoder().encode(first));
                        options.signal.addEventListener("abort", () => control.error(new Error("aborted")));
                    },
                });
                return new Response(held, { status: 200 });
            };
        }""")
        button(page, "Send").click()
        expect(button(page, "Stop")).to_be_enabled()
        button(page, "Stop").click()
        expect(page.locator(".answer .state")).to_have_text("stopped")
        expect(button(page, "Stop")).to_be_disabled()
        # Where the focus was there is nothing to press any more.
        assert focused(page) == "Send"
        page.get_by_label("Prompt").fill("too long " * 1000)
        button(page, "Send").click()
        expect(page.locator(".answer.wrong .state")).to_contain_text("maximum context length is 512 tokens")
    deadline = time.monotonic() + 10
    while fleet.client.get("/load").json()["server_load"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fleet.client.get("/load").json()["server_load"] == 0


def give_keys(page: Page, user: str, admin: str = "") -> None:
    page.locator("#keys-open").click()
    page.get_by_label("API key").fill(user)
    page.get_by_label("Admin key").fill(admin)
    button(page, "Use").click()


def test_keys_open_what_they_open_and_are_kept_nowhere(browser: Browser, start_server: StartServer) -> None:
    modules = ("--lora-modules", f"alpha={ADAPTERS / 'alpha'}")
    server = start_server(*modules, "--api-key", "user", "--admin-api-key", "admin", **ON)
    with opened(browser, server.url, "401 (Unauthorized)", "404 (Not Found)") as page:
        notice = page.get_by_role("alert")
        expect(notice).to_contain_text("`Authorization: Bearer KEY` is missing")
        expect(notice).to_contain_text(OPEN)
        give_keys(page, "wrong")
        expect(notice).to_contain_text("is not known")
        give_keys(page, "user")
        live(page)
        expect(notice).to_be_hidden()
        # Without the admin key there is nothing to manage.
        expect(page.get_by_text("Load an adapter")).to_be_hidden()
        expect(button(page, "Pin alpha")).to_be_hidden()
        give_keys(page, "user", "wrong")
        button(page, "Pin alpha").click()
        outcome = page.locator("#managed")
        expect(outcome).to_contain_text("is not the admin key")
        give_keys(page, "user", "admin")
        button(page, "Pin alpha").click()
        expect(outcome).to_contain_text("'alpha' pinned")
        expect(button(page, "Unpin alpha")).to_be_visible()
        page.get_by_text("Load an adapter").click()
        page.get_by_label("Name", exact=True).fill("new")
        page.get_by_label("Folder").fill("no-such-folder")
        button(page, "Load").click()
        expect(outcome).to_contain_text("no-such-folder")
        page.get_by_label("Folder").fill("beta")
        button(page, "Load").click()
        expect(outcome).to_contain_text("'new' added")
        expect(page.locator("#list")).to_contain_text("new")
        key = {"Authorization": "Bearer user"}
        assert "new" in server.client.get("/v1/models", headers=key).text
        button(page, "Unload new").click()
        expect(page.get_by_role("dialog")).to_contain_text("new is gone for new requests at once")
        button(page, "Unload").click()
        expect(outcome).to_contain_text("'new' removed")
        expect(page.locator("#list")).not_to_contain_text("new")
        assert '"new"' not in server.client.get("/v1/models", headers=key).text
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        assert page.get_by_label("API key").input_value() == ""
        page.reload()
        expect(notice).to_contain_text(OPEN)


def test_a_key_is_told_of_what_it_may_see(browser: Browser, start_server: StartServer, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    entries = "{name: all, key: k-all}, {name: one, key: k-one, adapters: [alpha], base: false}"
    file.write_text(f"keys: [{entries}]")
    modules = ("--lora-modules", f"alpha={ADAPTERS / 'alpha'}", f"beta={ADAPTERS / 'beta'}")
    server = start_server(*modules, "--keys-file", str(file))
    assert server.client.get("/shelf").status_code == 401
    everything, some = shelf(server, "k-all"), shelf(server, "k-one")
    assert [it["name"] for it in everything["adapters"]] == ["alpha", "beta"]
    assert everything["complete"]
    assert [it["name"] for it in some["adapters"]] == ["alpha"]
    hidden = {name: some[name] for name in ("complete", "memory", "counters", "running", "waiting")}
    assert hidden == {"complete": False, "memory": None, "counters": None, "running": None, "waiting": None}
    assert (some["rows"]["base"], some["base"]["names"], some["registered"]) == (None, [], 1)
    assert "beta" not in json.dumps(some)
    # One's revision is not the other's, and what is known is not told again.
    assert shelf(server, "k-all", everything["revision"])["adapters"] is None
    assert shelf(server, "k-one", some["revision"])["adapters"] is None
    assert len(shelf(server, "k-all", some["revision"])["adapters"]) == 2
    with opened(browser, server.url, "401 (Unauthorized)") as page:
        give_keys(page, "k-one")
        live(page)
        expect(page.locator("#list")).to_contain_text("alpha")
        expect(page.locator("body")).not_to_contain_text("beta")
        expect(page.locator("#pace")).to_contain_text("not told to this key")


@pytest.fixture
def shown(fleet: Server, tmp_path: Path) -> Iterator[Server]:
    """The server that pictures are made of: where they are for the docs, one with a real model and adapters."""
    if not SCREENSHOTS:
        yield fleet
        return
    # The adapters of the demonstration, and others of their sizes.
    demo = ORACLE.parent.parent / "python" / "manylora" / "demo" / "adapters"
    modules = [f"{name}={demo / name}" for name in ("sql", "support", "json")]
    for number in range(60):
        folder = tmp_path / f"tenant-{number:03d}"
        shutil.copytree(demo / ("sql", "support", "json")[number % 3], folder)
        config = json.loads((folder / "adapter_config.json").read_text())
        config["lora_alpha"] += (number + 1) / 1000
        (folder / "adapter_config.json").write_text(json.dumps(config))
        modules.append(f"{folder.name}={folder}")
    flags = [os.environ["MANYLORA_SMOLLM2"], "--device", "cpu", "--port", "0", "--served-model-name", "SmolLM2-135M"]
    flags += ["--max-model-len", "1024", "--max-num-seqs", "24", "--kv-cache-memory-bytes", "1G"]
    server = Server([*flags, "--lora-modules", *modules], tmp_path, ON)
    yield server
    server.close()


def test_pictures_for_the_docs(browser: Browser, shown: Server, tmp_path: Path) -> None:
    """Run with MANYLORA_SCREENSHOTS=docs/images, and MANYLORA_SMOLLM2, to make those that are committed."""
    folder = Path(SCREENSHOTS or tmp_path)
    base, *adapters = shown.ids()
    # What is on the shelf when they are made.
    for name in adapters[: 40 if SCREENSHOTS else 5]:
        shown.text(name, max_tokens=1)
    load = [base, *adapters[:3], *adapters[8:13]] if SCREENSHOTS else []
    views = [("light", {"width": 1100, "height": 1300}), ("dark", {"width": 1100, "height": 1300}), ("phone", PHONE)]
    with busy(shown, load, "List all customers."):
        for name, viewport in views:
            scheme: Any = "dark" if name == "dark" else "light"
            with opened(browser, shown.url, viewport=viewport, color_scheme=scheme) as page:
                live(page)
                for adapter in adapters[:2]:
                    button(page, f"Compare {adapter}").click()
                page.get_by_label("max_tokens").fill("32")
                if name != "phone":
                    button(page, "Send").click()
                    for state in page.locator(".answer .state").all():
                        expect(state).to_contain_text("ended by", timeout=60_000)
                page.wait_for_timeout(20_000 if SCREENSHOTS else 0)
                page.evaluate("scrollTo(0, 0)")
                picture = page.screenshot(path=folder / f"page-{name}.png")
                assert 10_000 < len(picture) < 200_000
