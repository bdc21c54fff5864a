"""The exception tree.

Every error a person can meet derives from `AnabranchError`; a message names the key, the value seen, what is
allowed and what to do next::

    AnabranchError
    ├── UsageError                something a person typed or configured
    │   ├── SpecError             run.toml, `--set` or a stored spec
    │   └── UrlError              a run URL
    ├── ServerError               the Redis or Valkey server
    │   ├── UnsuitableServer      reached, but too old or evicting
    │   ├── CommandRefused        reached, but it does not do what we ask: permission, limit, type of a key
    │   └── ServerUnreachable     not reached
    ├── MessageError              a message from another member that cannot be used
    │   ├── MalformedMessage      not decodable, or not what the schema says
    │   ├── OversizedMessage      larger than the limit, found before decoding
    │   └── SchemaMismatch        a schema version we do not speak
    ├── PayloadError              the tensors behind a message
    │   ├── BlobMissing           a chunk expired or was deleted
    │   ├── BlobCorrupt           size or SHA-256 differs from the claim
    │   └── UnusablePayload       wrong length, non-finite values, norm over the limit
    ├── MemberRefused             the synchronizer does not let this member in (or no longer)
    │   └── LayoutMismatch        the model's tensors differ from the run's
    ├── IslandBroken              another rank of the same island is gone, or trains something else
    ├── LeadershipLost            this process has to load the run again before it may lead again
    │   ├── Fenced                a newer leader holds the run: this process must stop writing
    │   ├── ServerChanged         the server was started again, replaced, or lost acknowledged writes
    │   └── ServerUnfit           the server may evict keys by now: nothing is written until it may not
    └── CheckpointError           a checkpoint that is missing, incomplete or damaged
"""

from __future__ import annotations


class AnabranchError(Exception):
    """Base of everything Anabranch raises on purpose."""


class UsageError(AnabranchError):
    """Something a person typed or configured cannot be used."""


class SpecError(UsageError):
    """A run's definition has an unknown key, a wrong type or an impossible combination."""


class UrlError(UsageError):
    """A run URL is not of the form `redis[s]://[user:password@]host[:port]/DB?run=NAME`."""


class ServerError(AnabranchError):
    """The Redis or Valkey server cannot be used."""


class UnsuitableServer(ServerError):
    """The server was reached but is too old, or may evict keys."""


class CommandRefused(ServerError):
    """The server does not carry out a command, and will not later; the message names command and remedy."""

    def __init__(self, message: str, code: str = "ERR") -> None:
        """`code`: first word of the server's reply, such as NOPERM."""
        super().__init__(message)
        self.code = code


class ServerUnreachable(ServerError):
    """The server did not answer."""


class MessageError(AnabranchError):
    """A message from another member cannot be used."""


class MalformedMessage(MessageError):
    """Not decodable, or not what the schema says."""


class OversizedMessage(MessageError):
    """Larger than the limit; found before decoding."""


class SchemaMismatch(MessageError):
    """Written in a schema version that this release does not speak."""


class PayloadError(AnabranchError):
    """The tensors behind a message cannot be used."""


class BlobMissing(PayloadError):
    """A chunk expired or was deleted."""


class BlobCorrupt(PayloadError):
    """Size or SHA-256 differs from what the claim check says."""


class UnusablePayload(PayloadError):
    """Wrong length, non-finite values, or a norm over the limit."""


class StateUnusable(PayloadError):
    """An optimizer's state that cannot be copied, or is not for this optimizer and model."""


class MemberRefused(AnabranchError):
    """The synchronizer does not let this member in, or no longer."""


class LayoutMismatch(MemberRefused):
    """The model's tensors differ from the run's; the message names the first one."""


class IslandBroken(AnabranchError):
    """Another rank of the same island is gone, or trains something else."""


class LeadershipLost(AnabranchError):
    """This process has to load the run again before it may lead again."""


class Fenced(LeadershipLost):
    """A newer leader holds the run; this process must stop writing."""


class ServerChanged(LeadershipLost):
    """The server was started again, replaced, or lost writes that it had acknowledged."""


class ServerUnfit(LeadershipLost):
    """The server may evict keys by now; nothing is written until it may not."""


class CheckpointError(AnabranchError):
    """A checkpoint is missing, incomplete or damaged."""
