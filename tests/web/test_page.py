"""The page in a real browser, drawn from a real run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Browser, ConsoleMessage, Page, async_playwright

from anabranch.orchestrator.core import lately
from anabranch.orchestrator.web.app import PageOptions, serve_page
from anabranch.queue.control import send_command
from anabranch.spec import RunSpec
from anabranch.workers.member.client import Client
from anabranch.workers.member.identity import Identity
from anabranch.workers.member.synthetic import Pace, SharedItems
from tests.fundamentals.test_03_hostile import Attacker
from tests.harness import Bench, bench, each_life, make_spec
from tests.tools import chromium_path, require
from tests.wait import PATIENCE_S, wait_until

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]  # one loop, so one browser for all

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=2</script>'
LONG = "a-worker-with-a-long-name-that-goes-on-and-on-42.example.org"
DESK, PHONE = (1280, 900), (390, 844)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    """Starting one takes longer than a test; every test has a context (cookies, cache, pages) of its own."""
    path = require(chromium_path(), "chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="module")
async def _no_tasks_left(browser: Browser) -> AsyncIterator[None]:
    """The guard of all async tests, on this module's loop: a task that the test started and left fails it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(5):
        await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    pages = [page.url for context in browser.contexts for page in context.pages]
    for context in browser.contexts:
        await context.close()
    assert not left, f"the test left tasks running: {sorted(task.get_name() for task in left)}"
    assert not pages, f"the test left pages open: {pages}"


@dataclass
class Shown:
    """The page as a reader sees it, and what its console said."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    async def read(self, selector: str) -> str:
        """The text of the first match."""
        return await self.page.locator(selector).first.inner_text()

    async def rows(self, selector: str) -> list[str]:
        script = "all => all.map(one => one.innerText ?? one.textContent)"  # SVG has no innerText
        return [" ".join(line.split()) for line in await self.page.locator(selector).evaluate_all(script)]

    async def until(self, selector: str, words: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until one of the matches contains `words`."""

        async def there() -> bool:
            return any(words in line for line in await self.rows(selector))

        await wait_until(there, f"{selector} says {words!r}", timeout_s)

    async def ask(self, script: str) -> Any:
        return await self.page.evaluate(script)


@asynccontextmanager
async def opened(browser: Browser, address: str, size: tuple[int, int] = DESK) -> AsyncIterator[Shown]:
    context = await browser.new_context(viewport={"width": size[0], "height": size[1]})
    shown = Shown(await context.new_page())

    def complain(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            shown.complaints.append(message.text)

    shown.page.on("console", complain)
    shown.page.on("pageerror", lambda error: shown.complaints.append(str(error)))
    await shown.page.goto(address)
    try:
        yield shown
    finally:
        await context.close()


def small(run_name: str, **rounds: Any) -> RunSpec:
    return make_spec(run_name, rounds={"fragments": 4, "inner_steps": 16, "deadline_min_s": 1.0, **rounds})


def add_judge(run: Bench) -> Client:
    """A member that adopts and never trains, as an evaluator does."""
    judge = run.add("judge", Pace(steps=0))
    judge.client.identity = Identity("judge", label="held-out text", role="evaluator")
    return judge.client


def measure(judge: Client, loss: float, tokens: int) -> None:
    """Report a held-out loss, as an evaluator would after measuring."""
    judge.vitals.heldout_loss, judge.vitals.measured_tokens = loss, tokens
    judge.progressed()


async def test_rounds_members_and_heldout_loss_move(browser: Browser, run_url: str, run_name: str) -> None:
    data = SharedItems(100_000, 4, lambda epoch, indices: None)
    async with (
        bench(run_url, small(run_name, quorum=2)) as run,
        serve_page(run.synchronizer, PageOptions()) as address,
        opened(browser, address) as shown,
    ):
        await shown.until("#phase", "waiting for a first worker")
        assert not await shown.page.locator("#data-card").is_visible()
        await shown.until("#hint", f"anabranch worker {run.url.redacted}")
        await shown.until("#chart-empty", "No held-out loss yet")
        assert await shown.page.locator("#members-empty").is_visible()

        run.add("quick", Pace(step_s=0.01), data=data)
        run.add("slow", Pace(step_s=0.03))
        await run.reach(1)
        judge = add_judge(run)
        await shown.until("#data-note", "epoch 1")
        await shown.until("#data li", "100,000")
        measure(judge, 5.5, 1000)
        await shown.until("#phase", "training")
        await shown.until("#link", "live")
        assert await shown.read("#run") == run_name
        assert "training" in await shown.page.title()
        await shown.until("#live", "2")
        await shown.until("#members tr", "judge evaluator · held-out text")
        await shown.until("#members tr", "quick synthetic · none ● live")
        await shown.until("#ledger tr", "✓ yes")
        await shown.until(".slot .words", "/2")
        await shown.until("#closed li", "all arrived")
        await shown.until(".chart .value", "5.500")
        tooltips = "[...document.querySelectorAll('#members .label')].map((label) => label.title)"
        assert all(tip.endswith("MB of memory") for tip in await shown.ask(tooltips)), "of each worker's process"
        steps = "Number(document.querySelector('#members td.number').textContent.replace(',', ''))"
        before, merged = await shown.ask(steps), int((await shown.read("#merged")).replace(",", ""))
        measure(judge, 2.125, 50_000)
        await shown.until(".chart .value", "2.125")
        await shown.until("#loss-note", "from 5.500")

        async def moved() -> bool:
            rounds = int((await shown.read("#merged")).replace(",", ""))
            return bool(await shown.ask(steps) > before and rounds > merged)

        await wait_until(moved, "steps and rounds go up")
        await shown.until("#fragments li", f"v{max(run.versions())}")
        await shown.page.locator("#plot").focus()
        await shown.page.keyboard.press("Home")
        await shown.until(".cursor", "5.500 at 1,000 tokens")
        await shown.page.keyboard.press("ArrowRight")
        await shown.until(".cursor", "2.125 at 50.0 k tokens")
        assert shown.complaints == []


async def test_the_tape_can_be_filtered_and_held(browser: Browser, run_url: str, run_name: str) -> None:
    async with bench(run_url, small(run_name)) as run:
        run.add("only", Pace(step_s=0.01))
        await run.reach(1)
        async with serve_page(run.synchronizer, PageOptions()) as address, opened(browser, address) as shown:
            await shown.until("#events li", "merged")
            await shown.page.locator("#hold").click()
            await shown.until("#events-note", "newer")
            held = await shown.rows("#events li")
            await run.reach(max(run.versions()) + 1)
            await shown.page.fill("#filter", "MERGED fragment 0")
            found = await shown.rows("#events li")
            assert found == [line for line in held if "merged" in line and "fragment 0" in line]
            assert found
            await shown.page.fill("#filter", "no such thing")
            assert await shown.read("#events-empty") == "No event matches the filter."
            await shown.page.locator("#hold").click()
            await shown.page.fill("#filter", "")

            async def newest() -> bool:
                rows = await shown.rows("#events li")
                return len(rows) > len(held) and rows[0] != held[0]

            await wait_until(newest, "the tape goes on")
            assert await shown.ask("document.activeElement.id") == "filter", "redrawing takes no focus away"
            assert shown.complaints == []


async def test_what_is_wrong_stands_out(
    browser: Browser, run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(run_url, small(run_name)) as run:
        run.add("stays", Pace(step_s=0.01))
        dies = run.add("dies", Pace(step_s=0.01))
        each_life(dies.client, lambda life: setattr(life.outbox, "submit", lambda _: None))  # it never answers
        await run.reach(1)
        await run.settle()
        mallory = Attacker(run, "mallory")
        await mallory.join()
        await mallory.contribute(np.full(run.state.fragments[0].size, np.nan))
        async with serve_page(run.synchronizer, PageOptions()) as address, opened(browser, address) as shown:
            await shown.until("#events li[data-level=warn]", "non-finite")
            await shown.until("#refused li", "contributions refused")
            await send_command(run.redis, run.keys, "set", key="rounds.quorum", value=2)
            await run.command("resume")
            await shown.until(".slot:has(.dots i.full) .words", "quorum 1/2")
            await shown.until("#events li[data-level=warn]", "abandoned")
            run.kill("dies")
            await shown.until("#phase", "quorum 1/2")
            await shown.until("#hint", "needs 1 more contribution")
            await shown.until("#members tr[data-condition=gone]", "dies")
            await shown.until("#events li[data-level=bad]", "dies: no heartbeat")
            member = next(m for m in run.state.members.values() if m.name == "stays")
            monkeypatch.setattr(lately, "shares", lambda _: {"merged": 0.1, "rejected": 0.2, "discarded": 0.7})
            await shown.until("#members tr[data-wasted=true]", "10 %")
            await shown.until("#complaints li", "of stays's tokens 10% were merged lately: 70% were discarded")
            member.account.add("applied", 0, 64)  # the books are wrong now
            await shown.until("#ledger tr[data-sum=wrong]", "✕ off by")
            await shown.until("#events li[data-level=bad]", "ledger mismatch")
            assert shown.complaints == []


async def test_what_members_write_stays_text_and_fits_a_phone(browser: Browser, run_url: str, run_name: str) -> None:
    async with bench(run_url, small(run_name)) as run:
        evil = run.add("evil", Pace(step_s=0.01))
        evil.client.identity = Identity("evil", label=EVIL, device="<b>")
        await run.reach(1)
        await evil.client.leave(EVIL)
        async with serve_page(run.synchronizer, PageOptions()) as address, opened(browser, address) as shown:
            await shown.until("#events .reason", f"evil joined ({EVIL})")
            await shown.until("#events .reason", f"evil left: {EVIL}")
            await shown.until("#members tr[data-condition=left]", "evil")
        long_name = run.add(LONG, Pace(step_s=0.01))
        long_name.client.identity = Identity(LONG, label=EVIL, device="<b>")
        measure(add_judge(run), 3.0, 1000)
        async with serve_page(run.synchronizer, PageOptions()) as address, opened(browser, address, PHONE) as shown:
            await shown.until("#members .label", f"{EVIL} · <b>")
            await shown.until("#ledger tr", "✓ yes")
            await shown.until(".slot .chips", LONG)
            await shown.until(".chart .value", "3.000")
            injected = "document.querySelectorAll('img, body script, .isolate *, .label *').length"
            assert await shown.ask(injected) == 0
            assert await shown.ask("window.hacked === undefined")
            for width in (390, 320):
                await shown.page.set_viewport_size({"width": width, "height": 700})
                assert await shown.ask("document.documentElement.scrollWidth") == width, "no sideways scrolling"
            assert shown.complaints == [], "nothing was even tried: the policy would complain"


async def test_it_says_when_it_shows_old_data_and_recovers(browser: Browser, run_url: str, run_name: str) -> None:
    async with bench(run_url, small(run_name)) as run:
        run.add("only", Pace(step_s=0.01))
        await run.reach(1)
        async with serve_page(run.synchronizer, PageOptions()) as address:
            page = opened(browser, address)
            shown = await page.__aenter__()
            await shown.until("#link", "live")
            assert not await shown.page.locator("#banner").is_visible()
        await shown.until("#link", "no connection")
        assert "What you see is" in await shown.read("#banner")
        assert "no connection" in await shown.page.title()
        frozen = await shown.read("#tokens")
        port = int(address.rsplit(":", 1)[1].rstrip("/"))
        async with serve_page(run.synchronizer, PageOptions(port=port)):
            await shown.until("#link", "live")
            assert not await shown.page.locator("#banner").is_visible()

            async def moved() -> bool:
                return await shown.read("#tokens") != frozen

            await wait_until(moved, "figures move again")
            numbers = [line for line in await shown.rows("#events li") if "joined" in line]
            assert len(numbers) <= 1, "no event twice"
            await page.__aexit__(None, None, None)
        assert all("Failed to load resource" in line for line in shown.complaints), "the browser's own remark"
