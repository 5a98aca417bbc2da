"""The page at /, in a headless browser: somebody talks to a model, and sees what the page promises to show."""

import json
import re

from playwright.sync_api import sync_playwright
from run import check


def talk(url, browser, picture):
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-quic", "--disable-background-networking"])
        page = chromium.new_page(viewport={"width": 1100, "height": 800})
        asked, talks, complaints = [], [], []
        page.on("request", lambda request: asked.append(request.url))
        # What went out, as roles.
        roles = lambda request: [m["role"] for m in json.loads(request.post_data)["messages"]]
        page.on("request", lambda request: talks.append(roles(request)) if request.method == "POST" else None)
        page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#model option", state="attached")
        check("page: the models", page.locator("#model option").all_text_contents() == ["default", "hybrid"], page.content())
        page.fill("#seed", "1")
        page.fill("#temperature", "0")

        def say(text, n):
            page.fill("#text", text)
            page.press("#text", "Enter")
            page.locator(".turn.model .facts").nth(n - 1).wait_for(timeout=60_000)
            return page.locator(".turn.model").nth(n - 1)

        answer = say("show the ten largest files under src", 1)
        facts = answer.locator(".facts").inner_text()
        check("page: an answer", "find" in answer.inner_text(), answer.inner_text())
        check("page: tokens a second", re.search(r"\d+ tokens, [\d.]+ tokens/s, first token after \d+ ms", facts), facts)
        probabilities = answer.locator(".token").evaluate_all("all => all.map(t => t.title)")
        check("page: probabilities", probabilities and all(re.fullmatch(r"\d+\.\d %", p) for p in probabilities), probabilities)
        facts = say("and the oldest", 2).locator(".facts").inner_text()
        known = re.search(r"(\d+) of (\d+) prompt tokens from the cache", facts)
        check("page: cache hits of a follow-up", known and 0 < int(known[1]) < int(known[2]), facts)
        page.screenshot(path=picture)
        check("page: a picture", picture.stat().st_size > 10_000, picture)
        # A long answer of the hybrid, stopped in the middle; what was said stays, and the next one comes.
        page.select_option("#model", "hybrid")
        page.click("#clear")
        check("page: cleared", page.locator(".turn").count() == 0, page.content())
        page.fill("#text", "Tell me everything.")
        page.click("#send")
        page.locator(".turn.model .token").first.wait_for()
        page.click("#stop")
        page.locator(".turn.model .facts").wait_for()
        stopped = page.locator(".turn.model .facts").inner_text()
        check("page: stopped", "stopped" in stopped and page.locator("#send").is_enabled(), stopped)
        page.select_option("#model", "default")
        check("page: after a stop", " tokens" in say("show free disk space", 2).locator(".facts").inner_text(), page.content())
        page.fill("#temperature", "1000")
        check("page: a refusal is shown", "temperature" in say("Hot?", 3).inner_text(), page.content())
        page.fill("#temperature", "")
        say("Cold?", 4)
        check("page: what was refused is forgotten", talks[-1] == talks[-2] and talks[-1][-2:] == ["assistant", "user"], talks)
        # Cleared while somebody talks: the next talk begins anew.
        # What was stopped may have come close to the end of the hybrid's context.
        page.click("#clear")
        page.select_option("#model", "hybrid")
        page.fill("#text", "Tell me more.")
        page.click("#send")
        page.locator(".turn.model .token").first.wait_for()
        page.click("#clear")
        page.locator("#send:enabled").wait_for()
        page.select_option("#model", "default")
        say("show free disk space", 1)
        check("page: cleared while a model talks", talks[-1] == ["user"], talks)
        check("page: nothing from elsewhere", all(a.startswith(url) for a in asked), asked)
        # The refusal is the one thing that the browser itself complains of.
        others = [c for c in complaints if "400" not in c]
        check("page: no complaints", not others, others)
        chromium.close()
