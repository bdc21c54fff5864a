"""The run URL: where the server is and which run on it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from anabranch.errors import UrlError
from anabranch.spec import ID_PATTERN

_FORM = "redis[s]://[user:password@]host[:port]/DB?run=NAME or unix:///path/to.sock?db=0&run=NAME"
URL_VARIABLE = "ANABRANCH_URL"  # the run to join where nobody names one
_OPTIONS = frozenset({"run", "db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs"})


@dataclass(frozen=True)
class RunUrl:
    """A parsed run URL. `server` is what redis-py takes; `run` is the run's name."""

    server: str
    run: str

    @classmethod
    def parse(cls, text: str) -> RunUrl:
        """Parse `text`; `UrlError` says what is wrong with it (never repeating a password)."""
        if not text:
            raise UrlError(f"no run URL: give {_FORM}, or set {URL_VARIABLE}")
        try:
            parts = urlsplit(text)
        except ValueError as error:  # an unclosed [ of an IPv6 address
            raise UrlError(f"{_redact(text)!r}: {error}; expected {_FORM}") from None
        if parts.scheme not in {"redis", "rediss", "unix"}:
            raise UrlError(
                f"{_redact(text)!r}: scheme {parts.scheme!r} is not redis, rediss or unix; expected {_FORM}"
            )
        if "@" in parts.query + parts.fragment or ("@" in parts.path and parts.scheme != "unix"):
            raise UrlError(f"{_redact(text)!r}: write / as %2F, ? as %3F and # as %23 in a password")
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if unknown := sorted(set(options) - _OPTIONS):
            raise UrlError(
                f"{_redact(text)!r}: unknown option {unknown[0]!r}; allowed: {', '.join(sorted(_OPTIONS))}"
            )
        run = options.pop("run", "run")
        if not re.fullmatch(ID_PATTERN, run):
            raise UrlError(f"run={run!r}: a run's name is 1 to 64 of A-Z a-z 0-9 . _ -")
        if parts.scheme == "unix":
            if not parts.path:
                raise UrlError(f"{_redact(text)!r}: no socket path; expected {_FORM}")
            options.setdefault("db", "0")
            # urlunsplit would drop the empty authority
            return cls(f"unix://{parts.netloc}{parts.path}?{urlencode(options)}", run)
        _check_network(parts.hostname, parts.path, text)
        path = parts.path if parts.path not in {"", "/"} else "/0"
        return cls(urlunsplit((parts.scheme, parts.netloc, path, urlencode(options), "")), run)

    def __str__(self) -> str:
        """The URL a person can paste on another machine (with its password)."""
        return f"{self.server}{'&' if '?' in self.server else '?'}run={quote(self.run)}"

    @property
    def redacted(self) -> str:
        """The URL without its password, for logs and pages."""
        return _redact(str(self))


def _check_network(host: str | None, path: str, text: str) -> None:
    if not host:
        raise UrlError(f"{_redact(text)!r}: no host; expected {_FORM}")
    if path not in {"", "/"} and not path[1:].isdecimal():
        raise UrlError(f"{_redact(text)!r}: database {path[1:]!r} is not a number; expected {_FORM}")
    try:
        _ = urlsplit(text).port
    except ValueError:
        raise UrlError(f"{_redact(text)!r}: the port is not a number up to 65535; expected {_FORM}") from None


def _redact(text: str) -> str:
    """Hide everything between a user's name and the last `@`: a password may hold an unquoted `/` or `#`."""
    scheme, _, rest = text.partition("://")
    user, at, host = rest.rpartition("@")
    if not at:
        return text
    name = unquote(user.partition(":")[0])
    return f"{scheme}://{name}:***@{host}"
