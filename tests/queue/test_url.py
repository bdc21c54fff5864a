"""The run URL: what is taken, what is refused, and that no password is ever repeated."""

from __future__ import annotations

import pytest
import redis

from anabranch.errors import UrlError
from anabranch.queue.connection import connect
from anabranch.queue.url import RunUrl
from tests.conftest import ServerFactory


@pytest.mark.parametrize(
    ("text", "server", "run"),
    [
        ("redis://host", "redis://host/0", "run"),
        ("redis://host/", "redis://host/0", "run"),
        ("redis://host:7000/3?run=mine", "redis://host:7000/3", "mine"),
        ("rediss://u:p@host/0?run=a.b-c_1", "rediss://u:p@host/0", "a.b-c_1"),
        ("redis://[::1]:7000/0", "redis://[::1]:7000/0", "run"),
        ("rediss://h/0?ssl_ca_certs=%2Fca.pem&run=x", "rediss://h/0?ssl_ca_certs=%2Fca.pem", "x"),
        ("unix:///tmp/a.sock", "unix:///tmp/a.sock?db=0", "run"),
        ("unix:///tmp/a.sock?db=2&run=x", "unix:///tmp/a.sock?db=2", "x"),
        ("unix://:p%20w@/tmp/a.sock?run=x", "unix://:p%20w@/tmp/a.sock?db=0", "x"),
    ],
)
def test_what_is_taken(text: str, server: str, run: str) -> None:
    url = RunUrl.parse(text)
    assert (url.server, url.run) == (server, run)
    assert RunUrl.parse(str(url)) == url, "what is shown can be pasted"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no run URL: give redis"),
        ("host:6379", "is not redis"),
        ("http://host/0", "scheme 'http' is not redis, rediss or unix"),
        ("redis:///0", "no host"),
        ("redis://host/zero", "database 'zero' is not a number"),
        ("redis://host/0/1", "database '0/1' is not a number"),
        ("redis://host:port/0", "the port is not a number"),
        ("redis://host:99999/0", "the port is not a number up to 65535"),
        ("redis://host/0?runs=x", "unknown option 'runs'; allowed: db, run"),
        ("redis://host/0?run=", "a run's name is 1 to 64"),
        ("redis://host/0?run=a%2Fb", "a run's name is 1 to 64"),
        ("redis://host/0?run=a%0A", "a run's name is 1 to 64"),
        ("redis://host/0?run=" + "x" * 65, "a run's name is 1 to 64"),
        ("redis://[::1/0", "Invalid IPv6 URL"),
        ("unix://?run=x", "no socket path"),
    ],
)
def test_what_is_refused_says_why(text: str, words: str) -> None:
    with pytest.raises(UrlError, match=words.replace("(", r"\(")):
        RunUrl.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://:hunter2@host/0",
        "redis://:hunter2@/0",
        "redis://user:hunter2@host/zero",
        "redis://:hunter2@host:99999/0",
        "redis://:hunter2@host/0?nonsense=1",
        "redis://:hun#ter2@host/0",  # not quoted, as people paste them
        "redis://:hun/ter2@host/0",
        "redis://:hun?ter2@host/0",
        "redis://hun:1/ter2@host/0",
        "redis://hun:1?ter2@host/0",
        "redis://hun:1#ter2@host/0",
        "redis://:hunter2@[::1/0",
        "unix://:hunter2@?run=x",
    ],
)
def test_no_error_repeats_a_password(text: str) -> None:
    with pytest.raises(UrlError) as raised:
        RunUrl.parse(text)
    assert "ter2" not in str(raised.value)


def test_an_unquoted_password_is_explained() -> None:
    with pytest.raises(UrlError, match=r"'redis://:\*\*\*@host/0': write / as %2F"):
        RunUrl.parse("redis://:a/b@host/0")


@pytest.mark.parametrize("text", ["redis://user:hunter2@host/0?run=x", "unix://:hunter2@/tmp/a.sock?run=x"])
def test_the_redacted_form_hides_the_password_only(text: str) -> None:
    shown = RunUrl.parse(text).redacted
    assert "hunter2" not in shown
    assert ":***@" in shown
    assert "run=x" in shown


async def test_a_unix_socket_with_a_password_can_be_reached(server_factory: ServerFactory) -> None:
    server = server_factory(unix_socket=True, password="pä ss")
    url = RunUrl.parse(f"{server.url}&run=mine")
    client = connect(url, name="test")
    assert await client.ping()
    await client.aclose()
    with redis.Redis.from_url(url.server) as plain:
        assert plain.ping()
