"""Every message that travels: envelope, schema, limits.

An envelope is a msgpack map `{s: schema version, t: type, r: run, b: body, g: signature}`; the body is msgpack
itself, so a signature (reserved, empty for now) can cover its exact bytes. Sizes are checked before anything
is decoded. Readers accept the current and the previous schema; unknown fields and types are refused. Writers use
the oldest schema that can say what they have to say, and nothing newer than the run's (`RunRecord.schema`), so that
members of two neighbouring releases work together. A new schema is a new number here, `introduced` at a message
that it brings, and `since` at a message that gets fields from it.

What members read of a run's state is a message, too (`Head` and what follows it).

Tensors never travel here: a message carries a `Claim` (a claim check) for chunks under blob keys.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

import msgpack
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from anabranch._version import VERSION
from anabranch.errors import MalformedMessage, OversizedMessage, SchemaMismatch
from anabranch.spec import ID_PATTERN

SCHEMA = 1
OLDEST_SCHEMA = 1  # that is still read: the one before `SCHEMA`, once there is one
ENVELOPE_LIMIT = 64 * 1024  # bytes of what members send
STATE_LIMIT = 64 * 1024 * 1024  # bytes of what the leader stores for members to read


def _printable(text: str) -> str:
    """Free text ends up in logs and terminals: no line breaks, no escape sequences."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


MOST_TOKENS = 2**53
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Tokens = Annotated[int, Field(ge=1, le=2**40)]  # of one contribution; sums of them must fit HINCRBY's 63 bits
Figure = Annotated[int, Field(ge=0, le=2**48)]  # a cumulative ledger column of one worker
Version = Annotated[int, Field(ge=-1, le=2**53)]  # -1: none
Name = Annotated[str, Field(pattern=ID_PATTERN)]
Label = Annotated[str, Field(max_length=200), AfterValidator(_printable)]
Text = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
Digest = Annotated[bytes, Field(min_length=32, max_length=32)]
Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]
Seconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
Loss = Annotated[float, Field(allow_inf_nan=False)] | None
Role = Literal["worker", "evaluator"]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Message(_Body):
    """Base of everything that can be an envelope's body."""

    type: ClassVar[str]  # what an envelope calls it: the class's name in lower case, unless the class says another
    introduced: ClassVar[int] = 1  # the first schema that has this message
    since: ClassVar[dict[str, int]] = {}  # fields that older schemas do not have, and the first that has them

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "type" not in vars(cls):
            cls.type = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


class Claim(_Body):
    """Claim check for a payload: where its chunks are and what they must hash to."""

    owner: Name
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{1,64}$")]
    bytes: Count
    chunk_bytes: Annotated[int, Field(ge=1, le=512 * 1024 * 1024)]
    codec: Annotated[str, Field(max_length=16)]
    hashes: Annotated[list[Digest], Field(max_length=1600)]  # SHA-256 of each chunk
    digest: Digest  # SHA-256 over the concatenated chunk hashes


class Figures(_Body):
    """A worker's cumulative ledger columns for one fragment, in whole tokens."""

    processed: Figure
    discarded: Figure
    pending: Figure


class Lease(_Body):
    """A data range for one incarnation. Positions count items in the range's own order, from its start."""

    number: Count  # of the lease; rising
    epoch: Count
    range: Count  # of this many in the dataset, from its start
    first: Count  # index in the dataset of the range's first item
    start: Count  # position to begin at; above 0: a dead worker's range goes on
    stop: Count  # items in the range


class Held(_Body):
    """How far a leased range is."""

    number: Count
    delivered: Count  # positions below were handed to the training loop
    settled: Count  # and below this one nothing is pending in any fragment


Leased = Annotated[list[Lease], Field(max_length=64)]
Holding = Annotated[list[Held], Field(max_length=256)]


# --- a member's inbox: `contributions:<worker>` -----------------------------------------------------------


class Register(Message):
    """Asks for an incarnation. `nonce` tells two processes with one name apart."""

    nonce: Nonce
    name: Name
    label: Label = ""
    role: Role = "worker"
    layout_hash: str | None = None  # None: takes the run's layout as it is
    can_init: bool = False
    device: Label = ""
    release: Label = ""


class Contribution(Message):
    """A worker's answer to a call. Identity: (incarnation, fragment, timeline, base)."""

    incarnation: Count
    fragment: Count
    timeline: Label
    base: Count  # version of the fragment that Δ was taken against
    base_digest: Digest
    round: Count  # the call it answers
    tokens: Tokens  # whose effect is in Δ
    steps: Tokens
    loss: Loss = None
    figures: Figures
    claim: Claim


class Decline(Message):
    """Asked for a contribution it cannot give."""

    incarnation: Count
    fragment: Count
    round: Count
    reason: Text


class Init(Message):
    """Version 0, from the one worker that was asked. Layout and the list of claims are blobs: they may be large."""

    incarnation: Count
    layout: Claim
    fragments: Claim  # msgpack list of one claim per fragment


class RangeRequest(Message):
    """Asks for data: `wanted` ranges that are not in hand yet, of a dataset that every worker has a copy of."""

    incarnation: Count
    items: Annotated[int, Field(ge=1, le=2**53)]
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    wanted: Annotated[int, Field(ge=1, le=64)]
    after: Count  # number of the newest lease taken: what was granted above it was not heard of


class StateRequest(Message):
    """A joiner asks for a peer's inner optimizer state (`--warm-start`), but not again for what did not help."""

    incarnation: Count
    not_from: Annotated[list[Count], Field(max_length=16)] = []  # incarnations


class StateOffer(Message):
    """A peer's inner optimizer state for a joiner, or none and why."""

    incarnation: Count
    to: Count
    claim: Claim | None = None
    reason: Text = ""


class Farewell(Message):
    """The member leaves; nothing follows."""

    incarnation: Count
    figures: Annotated[list[Figures], Field(max_length=1024)] = []
    reason: Text = ""
    leases: Holding = []  # `settled`: once everything that was sent has its outcome


# --- `progress:<worker>` ----------------------------------------------------------------------------------


class Progress(Message):
    """Heartbeat and figures, 1 to 10 per second. Lists have one item per fragment."""

    incarnation: Count
    steps: Count
    step_s: Seconds  # exponential average of wall time from step to step; 0 before the second step
    loss: Loss = None
    adopted: Annotated[list[Version], Field(max_length=1024)]  # version per fragment, -1: none
    held: Annotated[list[Figure], Field(max_length=1024)]  # tokens since the fragment was adopted
    processed: Figure
    discarded: Annotated[list[Figure], Field(max_length=1024)]
    pending: Annotated[list[Figure], Field(max_length=1024)]
    read: Count  # number of the last broadcast entry accounted for
    train_s: Seconds = 0.0  # spent in training steps
    rest_s: Seconds = 0.0  # duty-cycle rest
    life_s: Seconds = 0.0  # since training began
    bytes_sent: Count = 0
    memory_bytes: Count = 0  # of the process, resident; 0: not known
    heldout_loss: Loss = None  # evaluator only
    measured_tokens: Count = 0  # global tokens applied when it was measured
    timeline: Label = ""  # that the versions in `adopted` belong to
    leased: Count = 0  # number of the newest lease taken
    leases: Holding = []  # one up to `leased` that is not here is settled to its end
    idle: bool = False  # makes no steps because there is no data left for it


# --- `broadcast` ------------------------------------------------------------------------------------------


class Welcome(Message):
    name: Name
    nonce: Nonce
    incarnation: Count


class Refused(Message):
    """A registration that was turned away."""

    name: Name
    nonce: Nonce
    reason: Text
    retry: bool  # may succeed later (the name is still in use)


class Closed(Message):
    """These incarnations are over; a process that still lives registers anew and overwrites everything."""

    incarnations: list[int]
    reason: Text


class SendInit(Message):
    """Asks one worker for version 0."""

    incarnation: Count


class SendState(Message):
    """Asks one worker for its inner optimizer state, for the joiner `to`."""

    incarnation: Count
    to: Count


class PeerState(Message):
    """For the joiner `to`: where the inner optimizer state of `incarnation` is, or why there is none."""

    to: Count
    incarnation: Count  # whose it is; 0: nobody can be asked
    claim: Claim | None = None
    reason: Text = ""


class Born(Message):
    """Version 0 stands; read `state`."""

    timeline: Label


class Call(Message):
    """Opens a round: send me this fragment, based on this version."""

    round: Count
    fragment: Count
    timeline: Label
    base: Count
    called: list[int]  # incarnations
    deferred: list[int] = []


class Verdict(_Body):
    """What became of one contribution. `tokens` are those the synchronizer booked."""

    incarnation: Count
    fragment: Count
    base: Count
    applied: bool
    tokens: Count
    reason: Text = ""


class Merged(Message):
    """A round closed and its fragment has a new version: both facts in one entry."""

    round: Count
    fragment: Count
    timeline: Label
    version: Count
    claim: Claim
    closed: Literal["all arrived", "grace expired"]
    verdicts: list[Verdict]
    tokens: Count  # global tokens applied so far, parameter-weighted: drives learning-rate schedules
    reason: Text


class Verdicts(Message):
    """Outcomes of contributions that arrived after their base was superseded."""

    verdicts: list[Verdict]


class Abandoned(Message):
    round: Count
    fragment: Count
    base: Count
    reason: Text


class Resend(Message):
    """A contribution's payload is gone: send it again."""

    incarnation: Count
    fragment: Count
    base: Count


class Leases(Message):
    """Data ranges for one incarnation, or why there are none."""

    incarnation: Count
    timeline: Label
    leases: Leased = []
    exhausted: bool = False  # everything is handed out; what comes back is granted without being asked for again
    refused: Text = ""  # the dataset is not the run's


class Setting(Message):
    """A mutable setting changed."""

    type = "set"
    key: Label
    value: int | float | str | None


class Pause(Message):
    pass


class Resume(Message):
    pass


class Stop(Message):
    reason: Text


# --- `state`, as members read it --------------------------------------------------------------------------


class Head(Message):
    """Where the run stands."""

    timeline: Label
    tokens: Count  # global tokens applied, parameter-weighted
    paused: bool
    stopped: bool
    asked_init: Count  # incarnation that was asked for version 0; 0: none
    calls: list[Call]  # of the rounds that are open


class FragmentHead(Message):
    """One fragment's current version and where Θ is."""

    type = "fragment"
    version: Count
    claim: Claim


class Own(Message):
    """What became of one incarnation's contributions (the newest of each fragment), and its data ranges."""

    nonce: Nonce
    outcomes: list[Verdict]
    leases: list[Lease]


# --- `control` --------------------------------------------------------------------------------------------


class Command(Message):
    """An operator's wish; `id` makes a repeat harmless."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    action: Literal["pause", "resume", "stop", "checkpoint", "set"]
    key: Label = ""
    value: int | float | str | None = None
    by: Label = ""


TYPES = {kind.type: kind for kind in Message.__subclasses__()}


def encode(message: Message, run: str, schema: int = SCHEMA, limit: int = ENVELOPE_LIMIT) -> bytes:
    """The envelope's bytes, in at most `schema`, without what that cannot say; `OversizedMessage` above the limit."""
    said = {name: since for name, since in message.since.items() if since <= schema and getattr(message, name)}
    needed = max([message.introduced, *said.values()])
    body = msgpack.packb(message.model_dump(exclude=message.since.keys() - said.keys()))
    data: bytes = msgpack.packb({"s": needed, "t": message.type, "r": run, "b": body, "g": b""})
    if len(data) > limit:
        raise OversizedMessage(f"{message.type}: {len(data)} bytes, the limit is {limit}")
    return data


def decode(data: bytes, run: str, limit: int = ENVELOPE_LIMIT) -> Message:
    """Check size, envelope, schema version, run, then the body; raise a `MessageError` at the first fault."""
    if len(data) > limit:
        raise OversizedMessage(f"envelope of {len(data)} bytes, the limit is {limit}")
    envelope = _unpack(data, "envelope", limit)
    if set(envelope) != {"s", "t", "r", "b", "g"}:
        raise MalformedMessage(f"envelope has keys {_names(envelope)}, expected b, g, r, s, t")
    schema, kind, body = envelope["s"], envelope["t"], envelope["b"]
    if type(schema) is not int or not OLDEST_SCHEMA <= schema <= SCHEMA:
        raise SchemaMismatch(
            f"schema {_short(schema)}; this release ({VERSION}) reads {OLDEST_SCHEMA} to {SCHEMA}: install the same "
            "release everywhere (pip install anabranch==VERSION; `anabranch status` shows the run's)"
        )
    if envelope["r"] != run:
        raise MalformedMessage(f"envelope of run {_short(envelope['r'])}, expected {run!r}")
    if not isinstance(kind, str) or kind not in TYPES or not isinstance(body, bytes):
        raise MalformedMessage(f"unknown message type {_short(kind)}")
    content = _unpack(body, kind, limit)
    for name, since in TYPES[kind].since.items():
        if since > schema and name in content:
            raise MalformedMessage(f"{kind}.{name}: not in schema {schema}")
    try:
        return TYPES[kind].model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedMessage(f"{kind}.{where} = {_short(first['input'])}: {first['msg']}") from None


def pack(value: object) -> bytes:
    """msgpack for records that only the synchronizer writes and reads."""
    data: bytes = msgpack.packb(value)
    return data


def unpack(data: bytes) -> Any:
    """The inverse of `pack` for trusted records; `MalformedMessage` if damaged."""
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise MalformedMessage(f"record of {len(data)} bytes is not msgpack: {error}") from None


def _unpack(data: bytes, what: str, limit: int) -> dict[str, Any]:
    try:
        value = msgpack.unpackb(data, max_str_len=8192, max_bin_len=limit, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        detail = str(error) or type(error).__name__  # StackError, "too nested", has no text
        raise MalformedMessage(f"{what} of {len(data)} bytes is not valid msgpack: {detail[:200]}") from None
    if not isinstance(value, dict):
        raise MalformedMessage(f"{what} is a {type(value).__name__}, expected a map")
    return value


def _names(mapping: dict[Any, Any]) -> str:
    return ", ".join(sorted(_short(key) for key in list(mapping)[:8]))


def _short(value: object) -> str:
    try:
        text = repr(value)
    except RecursionError:  # nested deeper than Python can show, though msgpack could read it
        text = f"deeply nested {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."
