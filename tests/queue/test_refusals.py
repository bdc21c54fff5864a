"""What a server's error replies become: one line naming the command, the setting or permission, and the remedy."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.exceptions import MovedError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError

from anabranch.errors import AnabranchError, CommandRefused, ServerUnreachable
from anabranch.operate import command
from anabranch.operate import status as read_status
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import check_server, connect, plainly
from anabranch.queue.embedded import EmbeddedServer
from anabranch.queue.keys import Keys
from anabranch.queue.refusals import PERMISSIONS, code_of, is_passing, named, refused
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import bench, make_spec, process
from tests.wait import PATIENCE_S, wait_until

QUICK = Pace(step_s=0.003)
MB = 1 << 20


async def limited(server: EmbeddedServer, run: str, *rules: str) -> str:
    """The URL of a run for a user who may do only what the rules say."""
    redis = connect(RunUrl.parse(server.url), name="test")
    await redis.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", *rules)  # type: ignore[no-untyped-call]
    await redis.aclose()
    return f"{server.url.replace('redis://', 'redis://few:secret@')}?run={run}"


@pytest.mark.parametrize(
    ("error", "code", "passing"),
    [
        (ResponseError("WRONGTYPE Operation against a key"), "WRONGTYPE", False),
        (ResponseError("unknown command 'EVAL'"), "ERR", False),
        (ResponseError("Protocol error: invalid bulk length"), "ERR", False),
        (NoPermissionError("User few has no permissions to run the 'xadd' command"), "NOPERM", False),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), "NOREPLICAS", True),
        (ResponseError("MISCONF Errors writing to the AOF file"), "MISCONF", True),
        (ResponseError("UNBLOCKED force unblock from blocking operation"), "UNBLOCKED", True),
        (ResponseError("LOADING Redis is loading the dataset in memory"), "LOADING", True),
        (ResponseError("MASTERDOWN Link with MASTER is down"), "MASTERDOWN", True),
        (ResponseError("BUSY Redis is busy running a script"), "BUSY", True),
        (ResponseError("CLUSTERDOWN The cluster is down"), "CLUSTERDOWN", True),
        (ResponseError("TRYAGAIN Multiple keys request during rehashing of slot"), "TRYAGAIN", True),
        (ReadOnlyError("You can't write against a read only replica."), "READONLY", True),
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "OOM", True),
    ],
)
def test_an_error_reply_has_a_code_and_passes_or_not(error: ResponseError, code: str, passing: bool) -> None:
    assert code_of(error) == code
    assert is_passing(error) is passing


@pytest.mark.parametrize(
    ("command_", "name"),
    [
        (("HSET", "anabranch:{r/0}:state", "f", b"\x00" * 9000), "HSET anabranch:{r/0}:state"),
        (("EVALSHA", "a94a", 3, "anabranch:{r/0}:lease", "x"), "EVALSHA (a script) anabranch:{r/0}:lease"),
        (("XREAD", "COUNT", 256, "STREAMS", "one", "two", "0", "0"), "XREAD one"),
        (("CONFIG GET", "proto-max-bulk-len"), "CONFIG GET proto-max-bulk-len"),
        (("INFO",), "INFO"),
    ],
)
def test_a_command_is_named_with_its_key_and_without_values(command_: tuple[Any, ...], name: str) -> None:
    assert named(command_) == name


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (NoPermissionError("User few has no permissions to run the 'set' command"), "ACL SETUSER"),
        (ResponseError("ACL failure in script: User few has no permissions to run 'hset'"), "ACL SETUSER"),
        (ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value"), "rename or delete"),
        (ResponseError("Protocol error: invalid bulk length"), "proto-max-bulk-len"),
        (ResponseError("unknown command 'EVALSHA', with args beginning with: 'x'"), "rename-command"),
        (ResponseError("DB index is out of range"), "databases"),
        (ResponseError("something\r\nnobody thought of"), "look at the server's log"),
        (MovedError("1234 127.0.0.1:7001"), "look at the server's log"),
    ],
)
def test_a_refusal_is_one_line_with_a_remedy(error: ResponseError, remedy: str) -> None:
    text = str(refused(error, ("SET", "key", b"value")))
    assert text.startswith("the server refuses SET key: ")
    assert remedy in text
    assert "\n" not in text


# --- payloads and the server's limits ---------------------------------------------------------------------


async def test_chunks_fit_what_the_server_takes_in_one_value(server_factory: ServerFactory, run_name: str) -> None:
    redis = connect(RunUrl.parse(server_factory().url), name="test")
    await redis.config_set("proto-max-bulk-len", 2 * MB)
    blobs = RedisBlobs(redis, Keys(run_name))
    data = memoryview(bytes(5 * MB))
    claim = await blobs.put("w", data, "fp32", 60.0)
    assert claim.chunk_bytes == 2 * MB
    assert await blobs.get(claim, data.nbytes) == data
    await redis.config_set("proto-max-bulk-len", MB)
    with pytest.raises(CommandRefused, match=r"SET .*2,097,152 bytes, and its proto-max-bulk-len allows 1,048,576"):
        await blobs.put_again(claim, data, 60.0)
    assert (await blobs.put("w", data, "fp32", 60.0)).chunk_bytes == MB
    await redis.aclose()


async def test_chunks_fit_what_the_server_reads_of_one_command(server_factory: ServerFactory, run_name: str) -> None:
    redis = connect(RunUrl.parse(server_factory().url), name="test")
    await redis.config_set("client-query-buffer-limit", MB)
    blobs = RedisBlobs(redis, Keys(run_name))
    data = memoryview(bytes(5 * MB))
    claim = await blobs.put("w", data, "fp32", 60.0)
    assert claim.chunk_bytes < MB
    assert await blobs.get(claim, data.nbytes) == data
    await redis.aclose()


async def test_a_run_of_large_fragments_on_a_server_of_small_values(
    server_factory: ServerFactory, run_name: str
) -> None:
    server = server_factory()
    redis = connect(RunUrl.parse(server.url), name="test")
    await redis.config_set("proto-max-bulk-len", MB)
    await redis.aclose()
    spec = make_spec(run_name, task={"name": "synthetic", "options": {"tensors": 2, "size": 600_000}})
    async with bench(f"{server.url}?run={run_name}", spec) as run:
        run.add("w", QUICK)
        await run.reach(1)


async def test_where_the_limit_cannot_be_read_the_error_names_it(
    server_factory: ServerFactory, run_name: str
) -> None:
    server = server_factory()
    url = await limited(server, run_name, "~*", "&*", "+@all", "-config")
    admin, redis = (connect(RunUrl.parse(u), name="test", retries=0) for u in (server.url, url))
    await admin.config_set("proto-max-bulk-len", MB)
    with pytest.raises(Exception, match="proto-max-bulk-len"):
        await RedisBlobs(redis, Keys(run_name)).put("w", memoryview(bytes(5 * MB)), "fp32", 60.0)
    await admin.aclose()
    await redis.aclose()


# --- whoever meets one ------------------------------------------------------------------------------------


async def test_a_user_with_the_permissions_we_name_can_do_everything(
    server_factory: ServerFactory, run_name: str
) -> None:
    rules = PERMISSIONS.split()[3:]
    url = await limited(server_factory(), run_name, *rules)
    async with bench(url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(2)
        await command(RunUrl.parse(url), "pause")
        await wait_until(lambda: run.state.paused, "it is paused")
        assert (await read_status(RunUrl.parse(url)))["run"] == run_name


@pytest.mark.parametrize("missing", ["-evalsha", "-subscribe", "-xread", "-set"])
async def test_a_leader_without_a_permission_ends_naming_it(
    server_factory: ServerFactory, run_name: str, missing: str
) -> None:
    server = server_factory()
    url = await limited(server, run_name, "~*", "&*", "+@all", missing)
    synchronizer = Synchronizer(RunUrl.parse(url), make_spec(run_name))
    worker = SyntheticWorker(RunUrl.parse(f"{server.url}?run={run_name}"), "w", QUICK)
    with pytest.raises(CommandRefused, match=rf"no permissions to run the '{missing[1:]}' .*ACL SETUSER"):
        await both(synchronizer, worker)


async def both(synchronizer: Synchronizer, worker: SyntheticWorker) -> None:
    """Until the synchronizer ends."""
    training = asyncio.create_task(worker.run(), name="worker")
    try:
        await synchronizer.run()
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)


async def test_a_worker_without_a_permission_ends_with_an_error_of_ours(
    server_factory: ServerFactory, run_name: str
) -> None:
    server = server_factory()
    async with bench(f"{server.url}?run={run_name}", make_spec(run_name)) as run:
        worker = SyntheticWorker(RunUrl.parse(await limited(server, run_name, "~*", "&*", "+@all", "-xadd")), "w")
        with pytest.raises(CommandRefused, match=r"XADD .*contributions:w: .*'xadd'.*ACL SETUSER"):
            await worker.run()
        assert run.state.members == {}


async def test_a_key_of_another_type_is_named(server_factory: ServerFactory, run_name: str) -> None:
    async with bench(f"{server_factory().url}?run={run_name}", make_spec(run_name)) as run:
        await run.redis.set(run.keys.control, "not a stream")
        await wait_until(lambda: run.tape("trouble") or run.synchronizer.core, "it goes on")
        with pytest.raises(CommandRefused, match=r"XADD .*:control: WRONGTYPE .*rename or delete"):
            await command(run.url, "pause")


async def test_who_waits_for_nothing_gets_a_line_for_an_outage_too(server_factory: ServerFactory) -> None:
    server = server_factory()
    url = RunUrl.parse(f"{server.url}?run=x")
    redis = connect(url, name="test", retries=0)
    await redis.config_set("min-replicas-to-write", 1)
    with pytest.raises(ServerUnreachable, match="min-replicas-to-write"), plainly(url):
        await redis.set("a", 1)
    server.kill()
    with pytest.raises(ServerUnreachable), plainly(url):
        await redis.set("a", 1)
    await redis.aclose()


@pytest.mark.parametrize("words", [("orchestrator",), ("worker",), ("status",), ("pause",)], ids=" ".join)
async def test_the_command_line_says_it_in_one_line(
    server_factory: ServerFactory, run_name: str, words: tuple[str, ...]
) -> None:
    server = server_factory()
    url = await limited(server, run_name, "~*", "&*", "+@all", "-evalsha", "-get")
    extra = ("--no-page",) if words == ("orchestrator",) else ()
    with process(*words, url, *extra) as child:
        said, _ = child.communicate(timeout=PATIENCE_S)
    assert child.returncode == 2
    lines = [line for line in said.decode().splitlines() if line.startswith("anabranch: ")]
    assert len(lines) == 1
    assert "no permissions" in lines[0]
    assert "Traceback" not in said.decode()


# --- what works without some permissions ------------------------------------------------------------------


async def test_a_user_who_may_not_give_a_connection_its_name_gets_one(
    server_factory: ServerFactory, run_name: str
) -> None:
    url = RunUrl.parse(await limited(server_factory(), run_name, "~*", "+@all", "-client"))
    redis = connect(url, name="somebody")
    assert await redis.ping()
    await redis.aclose()


async def test_a_run_works_without_info_config_and_scan(server_factory: ServerFactory, run_name: str) -> None:
    url = await limited(server_factory(), run_name, "~*", "&*", "+@all", "-info", "-config", "-scan", "-client")
    async with bench(url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(2)
        assert (await read_status(run.url))["leader"]
    redis = connect(RunUrl.parse(url), name="test")
    assert await check_server(redis, RunUrl.parse(url)) == {}
    await redis.aclose()
    with pytest.raises(AnabranchError, match="no run 'other' on this server"):
        await command(RunUrl.parse(url.replace(run_name, "other")), "pause")
