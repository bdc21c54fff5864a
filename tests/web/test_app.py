"""The page's server: what it answers, whom it refuses, what it leaves behind."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse, ClientSession
from yarl import URL

from anabranch.errors import ServerError
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.orchestrator.web import app as page
from anabranch.orchestrator.web.app import PageOptions, serve_page
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec
from tests.wait import PATIENCE_S, wait_until

TOKEN = "let-me-in"
STATIC = Path(page.__file__).parent / "static"


@dataclass
class Served:
    """A run with one worker, its page, and a client."""

    run: Bench
    address: str
    http: ClientSession

    async def get(self, path: str, **options: Any) -> tuple[int, str]:
        async with self.http.get(self.address + path, **options) as response:
            return response.status, await response.text()

    async def status(self) -> dict[str, Any]:
        code, body = await self.get("api/status")
        assert code == 200
        picture: dict[str, Any] = json.loads(body)
        return picture

    async def control(self, action: str, token: str | None = None) -> int:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.http.post(f"{self.address}api/control/{action}", headers=headers) as response:
            return response.status


@asynccontextmanager
async def served(run_url: str, run_name: str, token: str | None = TOKEN) -> AsyncIterator[Served]:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("only", Pace(step_s=0.003))
        await run.reach(1)
        async with serve_page(run.synchronizer, PageOptions(token=token)) as address, ClientSession() as http:
            yield Served(run, address, http)


@asynccontextmanager
async def _starting(
    run_url: str, run_name: str, *, token: str | None = TOKEN
) -> AsyncIterator[tuple[str, ClientSession]]:
    """The page of a synchronizer that has not started: no Redis needed."""
    synchronizer = Synchronizer(RunUrl.parse(run_url), make_spec(run_name))
    async with serve_page(synchronizer, PageOptions(token=token)) as address, ClientSession() as http:
        yield address, http


@dataclass(frozen=True)
class Sent:
    """One server-sent event."""

    kind: str
    identity: str
    data: Any


async def next_event(response: ClientResponse) -> Sent:
    fields: dict[str, str] = {}
    while line := (await response.content.readline()).decode().rstrip("\n"):
        name, _, value = line.partition(": ")
        fields[name] = value
    return Sent(fields["event"], fields["id"], json.loads(fields["data"]))


async def next_of(response: ClientResponse, kind: str) -> Sent:
    async with asyncio.timeout(PATIENCE_S):
        while (event := await next_event(response)).kind != kind:
            pass
    return event


# --- what it answers --------------------------------------------------------------------------------------


async def test_the_page_and_its_files(run_url: str, run_name: str) -> None:
    kinds = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
    files = {f"static/{file.name}": kinds[file.suffix] for file in STATIC.iterdir()}
    async with served(run_url, run_name) as shown:
        for path, kind in {"": "text/html", "static/icon.svg": "image/svg+xml", **files}.items():
            async with shown.http.get(shown.address + path) as response:
                assert (response.status, response.content_type) == (200, kind), path
                body = await response.text()
            if kind == "text/html":
                assert not re.search(r"https?://|\bstyle=|<style|\bon\w+=|<script>", body), "the policy forbids these"


def test_scripts_import_only_each_other() -> None:
    for script in STATIC.glob("*.js"):
        for line in script.read_text().splitlines():
            if line.startswith("import"):
                found = re.fullmatch(r'import \{ .+ \} from "\./(\w+\.js)";', line)
                assert found, (script.name, line)
                assert (STATIC / found[1]).is_file(), (script.name, line)


async def test_unknown_paths_are_not_found(run_url: str, run_name: str) -> None:
    async with _starting(run_url, run_name) as (address, http):
        for path in ("no", "static/app.py", "static/..%2fapp.py", "static/%2e%2e/app.py", "api/", "api/control/a/b"):
            async with http.get(URL(address + path, encoded=True)) as response:
                assert response.status == 404, path
                assert response.headers["X-Content-Type-Options"] == "nosniff"


async def test_every_answer_has_the_security_headers(run_url: str, run_name: str) -> None:
    async with _starting(run_url, run_name) as (address, http):
        for path, host in (("", "localhost"), ("api/events", "localhost"), ("no", "localhost"), ("", "evil.example")):
            async with http.get(address + path, headers={"Host": host}) as response:
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'self'" in policy
                assert "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["Referrer-Policy"] == "no-referrer"
                assert response.headers["Cache-Control"] == "no-store"


async def test_status_has_what_the_page_draws(run_url: str, run_name: str) -> None:
    async with served(run_url, run_name) as shown:
        picture = await shown.status()
    assert (picture["run"], picture["phase"]) == (run_name, "training")
    assert picture["leader"] is picture["hearing"] is True
    assert picture["live"] == picture["participating"] == 1
    assert picture["tokens"] > 0
    assert [fragment["version"] >= 1 for fragment in picture["fragments"]] == [True, True]
    [member] = picture["members"]
    assert (member["name"], member["label"], member["condition"]) == ("only", "synthetic", "live")
    [row] = picture["ledger"]
    assert row["name"] == "only"
    assert row["unexplained"] == 0
    for round_ in picture["open"]:
        assert round_["phase"] in {"collecting", "grace", "merging"}
        assert round_["deadline_left_s"] > 0


async def test_a_synchronizer_without_a_run_yet_has_a_page(run_url: str, run_name: str) -> None:
    async with _starting(run_url, run_name) as (address, http):
        async with http.get(address + "api/status") as response:
            picture = await response.json()
        assert (picture["phase"], picture["leader"]) == ("starting", False)
        async with http.get(address + "api/events") as response:
            assert (await next_event(response)).data["phase"] == "starting"


async def test_health(run_url: str, run_name: str) -> None:
    async with served(run_url, run_name) as shown:
        code, body = await shown.get("healthz")
        assert code == 200
        assert json.loads(body)["ok"] is True


async def test_without_redis_it_says_so_and_takes_no_command(server_factory: ServerFactory, run_name: str) -> None:
    server = server_factory()
    async with served(f"{server.url}?run={run_name}", run_name) as shown:
        await asyncio.to_thread(server.stop)

        async def health(code: int) -> bool:
            return (await shown.get("healthz"))[0] == code

        await wait_until(lambda: health(503), "/healthz is 503")
        assert (await shown.status())["phase"] == "Redis does not answer"
        assert await shown.control("pause", TOKEN) == 503
        await asyncio.to_thread(server.start)
        await wait_until(lambda: health(200), "/healthz is 200 again")


# --- events -----------------------------------------------------------------------------------------------


async def test_events_deliver_status_and_tape_and_resume(run_url: str, run_name: str) -> None:
    async with served(run_url, run_name) as shown:
        url = shown.address + "api/events"
        async with shown.http.get(url) as response:
            assert response.content_type == "text/event-stream"
            tape = await next_of(response, "tape")
            status = await next_of(response, "status")
            later = await next_of(response, "tape")
        numbers = [event["number"] for event in tape.data]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert all(event["reason"] and event["kind"] and event["time"] for event in tape.data)
        assert status.data["run"] == run_name
        assert later.data[0]["number"] == numbers[-1] + 1
        async with shown.http.get(url, headers={"Last-Event-ID": tape.identity}) as response:
            resumed = await next_of(response, "tape")
        assert resumed.data[0]["number"] == numbers[-1] + 1, "goes on where the page stopped"


async def test_an_id_of_another_life_gets_everything(run_url: str, run_name: str) -> None:
    async with served(run_url, run_name) as shown:
        owner = shown.run.synchronizer.owner
        lives = ("another-life-7", "feedfacefeedface-99999", "x", "-1", "9" * 5000, "²", f"{owner}-²", f"{owner}-")
        for last in lives:
            headers = {"Last-Event-ID": last}
            async with shown.http.get(shown.address + "api/events", headers=headers) as response:
                assert (await next_of(response, "tape")).data[0]["number"] == 1, last


async def test_too_many_watchers_are_refused(run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_STREAMS", 2)
    monkeypatch.setattr(page, "REFRESH_S", 0.05)
    async with _starting(run_url, run_name) as (address, http):
        url = address + "api/events"
        async with http.get(url) as first:
            await next_of(first, "status")
            async with http.get(url) as second, http.get(url) as third:
                assert (second.status, third.status) == (200, 503)
                assert await third.text() == "2 pages are watching already\n"

        async def room_again() -> bool:
            async with http.get(url) as response:
                return response.status == 200

        await wait_until(room_again, "who left makes room")


async def test_a_page_that_hung_up_leaves_nothing_behind(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "REFRESH_S", 0.05)
    async with _starting(run_url, run_name) as (address, http):
        before = len(asyncio.all_tasks())
        async with http.get(address + "api/events") as response:
            await next_of(response, "status")
            assert len(asyncio.all_tasks()) > before
            response.close()
        await wait_until(lambda: len(asyncio.all_tasks()) <= before, "the handler has ended")


async def test_it_shuts_down_at_once_with_pages_open(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "SHUTDOWN_S", 4 * PATIENCE_S)
    synchronizer = Synchronizer(RunUrl.parse(run_url), make_spec(run_name))
    async with AsyncExitStack() as clients:
        http = await clients.enter_async_context(ClientSession())
        async with serve_page(synchronizer, PageOptions()) as address:
            for _ in range(3):
                response = await clients.enter_async_context(http.get(address + "api/events"))
                await next_of(response, "status")
            started = time.monotonic()
        assert time.monotonic() - started < PATIENCE_S, "pages do not hold it up until its time is over"
        assert await response.content.read() == b"", "the pages see the end of their streams"


# --- whom it refuses --------------------------------------------------------------------------------------


HOSTS = {
    "evil.example": 403,
    "evil.example:80": 403,
    "127.0.0.1.evil.example": 403,
    "10.0.0.1": 403,
    "localhost:1234": 200,
    "LOCALHOST": 200,
    "[::1]:1234": 200,
    "[::1]": 200,
}


async def test_only_its_own_names_reach_it(run_url: str, run_name: str) -> None:
    async with _starting(run_url, run_name) as (address, http):
        for host, code in HOSTS.items():
            for path in ("", "api/status", "api/events", "healthz", "static/page.js"):
                async with http.get(address + path, headers={"Host": host}) as response:
                    assert response.status == code, (host, path)
            async with http.post(address + "api/control/stop", headers={"Host": host}) as response:
                assert response.status == (401 if code == 200 else 403), host


async def test_control_needs_the_token_and_acts(run_url: str, run_name: str) -> None:
    async with served(run_url, run_name) as shown:
        for wrong in (None, "", "wrong", TOKEN + "x", "ü", "\udcff"):
            assert await shown.control("pause", wrong) == 401
        assert await shown.control("format", TOKEN) == 404
        async with shown.http.get(shown.address + "api/control/pause") as response:
            assert response.status == 405, "a link or an image cannot pause a run"
        assert shown.run.tape("announced") == []
        assert await shown.control("pause", TOKEN) == 202
        await wait_until(lambda: shown.run.state.paused and not shown.run.state.rounds, "the run is paused")
        assert (await shown.status())["phase"] == "paused"
        await wait_until(
            lambda: "paused (by page)" in {event["reason"] for event in shown.run.tape("announced")},
            "it is on the tape",
        )
        versions = shown.run.versions()
        assert await shown.control("resume", TOKEN) == 202
        await shown.run.reach(max(versions) + 1)


async def test_without_a_token_nobody_controls(run_url: str, run_name: str) -> None:
    tries: list[dict[str, str]] = [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer None"}]
    for token in (None, ""):
        async with _starting(run_url, run_name, token=token) as (address, http):
            for headers in tries:
                async with http.post(address + "api/control/stop", headers=headers) as response:
                    assert response.status == 401


async def test_behind_a_proxy_the_page_answers_to_the_names_it_was_given(run_url: str, run_name: str) -> None:
    synchronizer = Synchronizer(RunUrl.parse(run_url), make_spec(run_name))
    options = PageOptions(names=("Runs.example.org",))
    async with serve_page(synchronizer, options) as address, ClientSession() as http:
        for host, expected in (("runs.example.org", 200), ("runs.example.org:8080", 200), ("other.example.org", 403)):
            async with http.get(address, headers={"Host": host}) as response:
                assert response.status == expected
                if expected == 403:
                    assert "start it with --page-name other.example.org" in await response.text()


async def test_a_taken_port_is_named(run_url: str, run_name: str) -> None:
    async with _starting(run_url, run_name) as (address, _):
        port = int(address.rsplit(":", 1)[1].rstrip("/"))
        synchronizer = Synchronizer(RunUrl.parse(run_url), make_spec(run_name))
        with pytest.raises(ServerError, match=rf"127\.0\.0\.1:{port}.*choose another port for the page: --page-port"):
            async with serve_page(synchronizer, PageOptions(port=port)):
                pass
