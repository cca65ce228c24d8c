"""The page at `/` in a real browser: its files, what it shows, and that everybody can use it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from .browser import PHONE, busy, button, focused, live, opened, shelf, unfit_for_some
from .conftest import MANY, ORACLE, Server, StartServer

FILES = ORACLE.parent.parent / "crates" / "manylora-server" / "page"
LAST = f"tenant-{MANY - 1:04d}"


def test_files_are_the_servers_own_and_run_nothing_else(browser: Browser, fleet: Server) -> None:
    for path in ("/", *(f"/page/{file.name}" for file in FILES.iterdir() if file.name != "index.html")):
        answer = fleet.client.get(path)
        assert answer.status_code == 200, path
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        again = fleet.client.get(path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        # Text of others never becomes markup, and nothing is fetched from elsewhere.
        words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|sessionStorage|cookie"
        assert re.search(words, answer.text) is None, path
        assert set(re.findall(r"https?://[^\"' ]+", answer.text)) <= {"http://www.w3.org/2000/svg"}, path
    assert fleet.client.get("/page/main.css").status_code == 404
    assert fleet.client.get("/page/../src/lib.rs").status_code == 404
    violations = ("Content Security Policy", "Failed to fetch")
    with opened(browser, fleet.url, *violations) as page:
        live(page)
        tried = page.evaluate("""async () => {
            const script = Object.assign(document.createElement("script"), { textContent: "window.ran = true" });
            document.head.append(script);
            const elsewhere = await fetch("http://127.0.0.1:1/").catch((error) => error.name);
            return [window.ran ?? false, elsewhere];
        }""")
        assert tried == [False, "TypeError"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_has_nothing_to_object_to(browser: Browser, fleet: Server, scheme: Any) -> None:
    with opened(browser, fleet.url, color_scheme=scheme) as page:
        live(page)
        button(page, "Compare alpha").click()
        button(page, "Send").click()
        expect(page.locator(".answer .state").last).to_contain_text("ended by")
        page.get_by_text("Load an adapter").click()
        assert unfit_for_some(page) == []
        button(page, "Keys").click()
        assert unfit_for_some(page) == []
        page.keyboard.press("Escape")
        page.set_viewport_size(PHONE)
        assert unfit_for_some(page) == []
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        shade = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
        assert (shade < 60) == (scheme == "dark"), background


def test_two_thousand_adapters_are_listed_and_found(browser: Browser, fleet: Server) -> None:
    with opened(browser, fleet.url) as page:
        live(page)
        grid = page.get_by_role("grid", name="Adapters")
        expect(grid).to_have_attribute("aria-rowcount", str(MANY + 2))
        rows = grid.get_by_role("row")
        assert 8 <= rows.count() < 40
        # To the end by scrolling, and by the keyboard.
        grid.evaluate("(grid) => { grid.scrollTop = grid.scrollHeight; }")
        expect(grid.get_by_text(LAST, exact=True)).to_be_visible()
        assert rows.count() < 40
        rows.last.focus()
        page.keyboard.press("Home")
        expect(page.locator(".row:focus .name")).to_have_text("alpha")
        page.keyboard.press("End")
        expect(page.locator(".row:focus .name")).to_have_text(LAST)
        for _ in range(3):
            page.keyboard.press("PageUp")
        expect(page.locator(".row:focus")).to_be_visible()
        page.get_by_label("Find").fill("NANT-1999")
        expect(rows).to_have_count(1)
        expect(page.locator("#adapters-sum")).to_contain_text(f"1 of {MANY + 2:,} adapters")
        page.get_by_label("Find").fill("nobody")
        expect(grid).to_contain_text("No adapter has that in its name.")
        page.get_by_label("Find").fill("")
        page.get_by_label("resident only").check()
        resident = sum(adapter["tier"] is not None for adapter in shelf(fleet)["adapters"])
        assert 2 <= resident < MANY
        expect(grid).to_have_attribute("aria-rowcount", str(resident))


def test_a_phone_needs_no_sideways_scrolling(browser: Browser, fleet: Server) -> None:
    with opened(browser, fleet.url, viewport=PHONE, has_touch=True) as page:
        live(page)
        button(page, "Compare alpha").tap()
        button(page, "Send").tap()
        expect(page.locator(".answer .state").last).to_contain_text("ended by")
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        # Nor is anything cut off that is to be pressed or read.
        cut = page.evaluate("""() => [...document.querySelectorAll("button, input, textarea, h2, h3, p, .facts")]
            .filter((it) => it.checkVisibility() && !it.classList.contains("unseen"))
            .map((it) => [it.textContent, it.getBoundingClientRect()])
            .filter(([, box]) => box.left < 0 || box.right > innerWidth).map(([text]) => text)""")
        assert cut == []


def test_everything_is_within_reach_of_the_keyboard(browser: Browser, fleet: Server) -> None:
    with opened(browser, fleet.url) as page:
        live(page)
        stops: list[str] = []
        while len(stops) < 60:
            page.keyboard.press("Tab")
            stop = focused(page)
            if stop == "" or stop in stops[:1]:
                break
            # Whatever has the focus shows it.
            assert page.evaluate("""() => {
                const it = document.activeElement;
                const shown = it.closest(".picture") ?? it;
                return it.matches(":focus-visible") && getComputedStyle(shown).outlineStyle !== "none";
            }"""), stop
            stops.append(stop)
        expected = [
            "To the playground", "keys-open", "Memory, part by part", "find", "resident-only", "alpha",
            "Compare alpha", "Pin alpha", "Unload alpha", "Load an adapter", "prompt", "form", "temperature",
            "max-tokens", "lora-scale",
        ]  # fmt: skip
        assert [next((word for word in expected if stop.startswith(word)), stop) for stop in stops][:15] == expected
        assert len(stops) < 30, stops

        page.locator("[role=listbox]").focus()
        parts = [page.locator("#detail").inner_text()]
        for _ in range(3):
            page.keyboard.press("ArrowRight")
            parts.append(page.locator("#detail").inner_text())
        assert parts[0].startswith("Base: ")
        assert parts[1].startswith("Working memory: ")
        version = next(it["version"] for it in shelf(fleet)["adapters"] if it["name"] == "alpha")
        assert f"version {version[:12]}" in "".join(parts)
        # From the picture to the adapter in the list, and from there to the playground.
        page.keyboard.press("Home")
        while "alpha" not in page.locator("#detail").inner_text():
            page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        expect(page.locator(".row:focus .name")).to_have_text("alpha")
        page.keyboard.press("Enter")
        expect(button(page, "Compare alpha")).to_have_attribute("aria-pressed", "true")
        expect(page.get_by_role("status").first).to_have_text("alpha is compared.")
        # A dialog is left by Escape, and the focus is where it was.
        page.locator("#keys-open").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        assert focused(page) == "keys-open"


def test_the_picture_is_to_scale_and_adds_up(browser: Browser, fleet: Server) -> None:
    told = shelf(fleet)
    memory = told["memory"]
    assert sum({it["version"]: it["bytes"] for it in told["adapters"] if it["tier"]}.values()) == memory["adapters"]
    assert memory["kv_cache"] + memory["adapters"] + memory["loading"] <= memory["ledger"]
    with opened(browser, fleet.url) as page:
        live(page)
        expect(page.locator(".part.adapter").first).to_be_attached()
        drawn: dict[str, float] = page.evaluate("""() => {
            const long = {};
            for (const part of document.querySelectorAll("[role=listbox] .part")) {
                const pieces = [...part.getAttribute("d").matchAll(/M[^h]+h([\\d.]+)/g)];
                long[part.getAttribute("aria-label")] = pieces.reduce((sum, it) => sum + Number(it[1]), 0);
            }
            return long;
        }""")
        all_bytes = memory["weights"] + memory["working"] + memory["ledger"]
        per_byte = sum(drawn.values()) / all_bytes
        long = {name.split(":")[0]: pixels for name, pixels in drawn.items()}
        assert long["Base"] == pytest.approx(memory["weights"] * per_byte, rel=0.02, abs=2)
        assert long["Working memory"] == pytest.approx(memory["working"] * per_byte, rel=0.02, abs=2)
        free = memory["kv_cache"] - memory["kv_cache_used"]
        assert long["KV cache free"] == pytest.approx(free * per_byte, rel=0.02, abs=2)
        held = sum(it["bytes"] for it in told["adapters"] if it["name"] in ("alpha", "beta"))
        assert long["alpha"] + long["beta"] == pytest.approx(held * per_byte, rel=0.1, abs=3)


def test_rows_are_those_that_run_and_wait(browser: Browser, fleet: Server) -> None:
    with busy(fleet, ["base", "alpha"] * 8, "List all customers."), opened(browser, fleet.url) as page:
        live(page)
        expect(page.locator("#rows .strip").first).to_contain_text("Running 32 of 32")
        row = page.locator("tbody tr", has_text="alpha")
        expect(row.locator("td").last).not_to_have_text("0")
        expect(page.locator(".figure").first.locator(".number")).not_to_have_text("\N{EN DASH}")
        told = shelf(fleet)
        rows = [told["rows"]["base"], *told["rows"]["adapters"]]
        assert {it["name"] for it in rows[1:]} <= {"alpha"}
        assert sum(it["running"] for it in rows) == told["running"] <= 32
        assert sum(it["waiting"] for it in rows) == told["waiting"]
        assert told["memory"]["kv_cache_used"] > 0


def test_nothing_is_asked_while_nobody_looks(browser: Browser, fleet: Server) -> None:
    with opened(browser, fleet.url) as page:
        live(page)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        hide = """(hidden) => {
            Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
        page.evaluate(hide, True)
        # What was under way ends.
        page.wait_for_timeout(300)
        asked.clear()
        page.wait_for_timeout(1500)
        assert asked == []
        page.evaluate(hide, False)
        page.wait_for_timeout(1300)
        assert len(asked) >= 2
        # The list is not sent again while it is the same.
        assert all(re.search(r"known=[0-9a-f]{16}$", url) for url in asked)


def test_the_page_is_found_under_a_path_and_can_be_left_out(browser: Browser, start_server: StartServer) -> None:
    server = start_server("--root-path", "/models/one")
    for path in ("/models/one", "/models/one/", "/"):
        with opened(browser, server.url + path) as page:
            live(page)
            icon = page.locator("header img")
            assert icon.evaluate("(image) => image.complete && image.naturalWidth > 0"), path
    without = start_server("--disable-page")
    for path in ("/", "/page/main.js"):
        assert without.client.get(path).status_code == 404
    assert without.client.get("/shelf").status_code == 200


def test_motion_is_left_out_where_it_is_unwanted(browser: Browser, fleet: Server) -> None:
    duration = "getComputedStyle(document.querySelector('button')).transitionDuration"
    for motion, moves in (("no-preference", True), ("reduce", False)):
        with opened(browser, fleet.url, reduced_motion=motion) as page:
            live(page)
            assert (page.evaluate(duration) != "0s") == moves
