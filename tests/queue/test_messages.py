"""What travels, and what is refused before it can do harm."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from anabranch.errors import MalformedMessage, MessageError, OversizedMessage, SchemaMismatch
from anabranch.queue import messages
from anabranch.queue.messages import ENVELOPE_LIMIT, TYPES, Message, decode, encode

RUN = "run"

count = st.integers(0, 2**53)
tokens = st.integers(1, 2**40)
name = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)
text = st.text(st.characters(codec="utf-8"), max_size=40).map(lambda t: "".join(c for c in t if c.isprintable()))
digest = st.binary(min_size=32, max_size=32)
nonce = st.binary(min_size=16, max_size=16)
finite = st.floats(allow_nan=False, allow_infinity=False)
seconds = st.floats(0, 1e12)
loss = st.none() | finite
numbers = st.lists(st.integers(-1, 2**53), max_size=4)
figure = st.integers(0, 2**48)
figure_list = st.lists(figure, max_size=4)
value = st.none() | st.integers(-(2**63), 2**63 - 1) | finite | text

claim = st.builds(
    messages.Claim,
    owner=name,
    id=st.from_regex(r"[0-9a-f]{1,64}", fullmatch=True),
    bytes=count,
    chunk_bytes=st.integers(1, 512 * 1024 * 1024),
    codec=st.sampled_from(["fp32", "bf16"]),
    hashes=st.lists(digest, max_size=3),
    digest=digest,
)
figures = st.builds(messages.Figures, processed=figure, discarded=figure, pending=figure)
verdict = st.builds(
    messages.Verdict,
    incarnation=count,
    fragment=count,
    base=count,
    applied=st.booleans(),
    tokens=count,
    reason=text,
)
lease = st.builds(messages.Lease, number=count, epoch=count, range=count, first=count, start=count, stop=count)
held = st.builds(messages.Held, number=count, delivered=count, settled=count)

call = st.builds(
    messages.Call, round=count, fragment=count, timeline=text, base=count, called=numbers, deferred=numbers
)

FIELDS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "register": {"nonce": nonce, "name": name, "label": text, "role": st.sampled_from(["worker", "evaluator"]),
                 "layout_hash": st.none() | text, "can_init": st.booleans(), "device": text, "release": text},
    "contribution": {"incarnation": count, "fragment": count, "timeline": text, "base": count,
                     "base_digest": digest, "round": count, "tokens": tokens, "steps": tokens, "loss": loss,
                     "figures": figures, "claim": claim},
    "decline": {"incarnation": count, "fragment": count, "round": count, "reason": text},
    "init": {"incarnation": count, "layout": claim, "fragments": claim},
    "farewell": {"incarnation": count, "figures": st.lists(figures, max_size=3), "reason": text,
                 "leases": st.lists(held, max_size=3)},
    "range_request": {"incarnation": count, "items": st.integers(1, 2**53), "wanted": st.integers(1, 64),
                      "fingerprint": st.from_regex(r"[0-9a-f]{16,64}", fullmatch=True), "after": count},
    "leases": {"incarnation": count, "timeline": text, "leases": st.lists(lease, max_size=3),
               "exhausted": st.booleans(), "refused": text},
    "progress": {"incarnation": count, "steps": count, "step_s": seconds, "loss": loss,
                 "adopted": numbers, "held": figure_list, "processed": figure,
                 "discarded": figure_list, "pending": figure_list, "read": count, "train_s": seconds,
                 "rest_s": seconds, "life_s": seconds, "bytes_sent": count, "memory_bytes": count,
                 "heldout_loss": loss, "measured_tokens": count, "timeline": text, "leased": count,
                 "leases": st.lists(held, max_size=3), "idle": st.booleans()},
    "welcome": {"name": name, "nonce": nonce, "incarnation": count},
    "refused": {"name": name, "nonce": nonce, "reason": text, "retry": st.booleans()},
    "closed": {"incarnations": numbers, "reason": text},
    "send_init": {"incarnation": count},
    "state_request": {"incarnation": count, "not_from": st.lists(count, max_size=16)},
    "send_state": {"incarnation": count, "to": count},
    "state_offer": {"incarnation": count, "to": count, "claim": st.none() | claim, "reason": text},
    "peer_state": {"incarnation": count, "to": count, "claim": st.none() | claim, "reason": text},
    "born": {"timeline": text},
    "call": {"round": count, "fragment": count, "timeline": text, "base": count, "called": numbers,
             "deferred": numbers},
    "merged": {"round": count, "fragment": count, "timeline": text, "version": count, "claim": claim,
               "closed": st.sampled_from(["all arrived", "grace expired"]),
               "verdicts": st.lists(verdict, max_size=3), "tokens": count, "reason": text},
    "verdicts": {"verdicts": st.lists(verdict, max_size=3)},
    "abandoned": {"round": count, "fragment": count, "base": count, "reason": text},
    "resend": {"incarnation": count, "fragment": count, "base": count},
    "set": {"key": text, "value": value},
    "pause": {},
    "resume": {},
    "stop": {"reason": text},
    "head": {"timeline": text, "tokens": count, "paused": st.booleans(), "stopped": st.booleans(),
             "asked_init": count, "calls": st.lists(call, max_size=2)},
    "fragment": {"version": count, "claim": claim},
    "own": {"nonce": nonce, "outcomes": st.lists(verdict, max_size=3), "leases": st.lists(lease, max_size=2)},
    "command": {"id": st.from_regex(r"[0-9a-f]{8,64}", fullmatch=True),
                "action": st.sampled_from(["pause", "resume", "stop", "checkpoint", "set"]), "key": text,
                "value": value, "by": text},
}  # fmt: skip


def _every_subclass(base: type[Message]) -> set[type[Message]]:
    below = set(base.__subclasses__())
    return below.union(*(_every_subclass(kind) for kind in below))


def test_every_message_can_be_decoded_and_has_a_type_of_its_own() -> None:
    assert set(TYPES.values()) == _every_subclass(Message)
    assert all(TYPES[kind].type == kind for kind in TYPES)


def test_the_round_trip_below_covers_every_field_of_every_message() -> None:
    assert {kind: set(fields) for kind, fields in FIELDS.items()} == {
        kind: set(message.model_fields) for kind, message in TYPES.items()
    }


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_what_is_encoded_is_decoded_again(kind: str) -> None:
    @settings(max_examples=40)
    @given(st.fixed_dictionaries(FIELDS[kind]))
    def round_trip(fields: dict[str, Any]) -> None:
        message = TYPES[kind](**fields)
        data = encode(message, RUN)
        assert decode(data, RUN) == message
        assert len(data) <= ENVELOPE_LIMIT

    round_trip()


@given(st.binary(max_size=400))
def test_no_bytes_do_worse_than_a_message_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode(data, RUN)


@given(st.data())
def test_a_damaged_envelope_does_no_worse_than_a_message_error(data: st.DataObject) -> None:
    good = bytearray(encode(messages.Welcome(name="w", nonce=bytes(16), incarnation=3), RUN))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at] = data.draw(st.integers(0, 255))
    with suppress(MessageError):
        assert isinstance(decode(bytes(good), RUN), Message)


def envelope(body: dict[Any, Any] | bytes = b"\x80", **changes: Any) -> bytes:
    packed = body if isinstance(body, bytes) else msgpack.packb(body)
    data: bytes = msgpack.packb({"s": 1, "t": "pause", "r": RUN, "b": packed, "g": b"", **changes})
    return data


def test_the_size_is_checked_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(msgpack, "unpackb", never)
    with pytest.raises(OversizedMessage, match="65537 bytes, the limit is 65536"):
        decode(b"\xc0" * (ENVELOPE_LIMIT + 1), RUN)


def test_too_much_is_not_even_encoded() -> None:
    huge = messages.Closed(incarnations=list(range(70_000)), reason="")
    with pytest.raises(OversizedMessage, match="closed: "):
        encode(huge, RUN)


@pytest.mark.parametrize("depth", [100, 990, 1020, 5000, 60_000])
@pytest.mark.parametrize("where", ["schema", "body"])
def test_deep_nesting_is_a_message_error(depth: int, where: str) -> None:
    """Depths that msgpack reads but Python cannot show are the dangerous ones."""
    nested = b"\x91" * depth + b"\x90"
    if where == "schema":
        data = b"\x85\xa1s" + nested + b"\xa1t\xa5pause\xa1r\xa3run\xa1b\xc4\x01\x80\xa1g\xc4\x00"
    else:
        data = envelope(b"\x81\xa6reason" + nested, t="stop")
    with pytest.raises(MessageError):
        decode(data, RUN)


def test_a_message_of_another_run_is_refused() -> None:
    data = encode(messages.Pause(), "other")
    with pytest.raises(MalformedMessage, match="envelope of run 'other', expected 'run'"):
        decode(data, RUN)


@pytest.mark.parametrize("schema", [0, 2, 99, "1", True, 1.0, None])
def test_another_schema_names_what_to_install(schema: object) -> None:
    with pytest.raises(SchemaMismatch, match=r"reads 1 to 1: install the same release everywhere"):
        decode(envelope(s=schema), RUN)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="unknown message type 'gossip'"):
        decode(envelope(t="gossip"), RUN)


@pytest.mark.parametrize("kind", [["pause"], {"a": 1}, b"pause", None, 7])
def test_a_type_that_is_no_word_is_refused(kind: object) -> None:
    with pytest.raises(MalformedMessage, match="unknown message type"):
        decode(envelope(t=kind), RUN)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"pause\.extra"):
        decode(envelope({"extra": 1}), RUN)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(MalformedMessage, match=r"stop\.reason .* Field required"):
        decode(envelope({}, t="stop"), RUN)


@pytest.mark.parametrize("keys", [{"x": 1}, {7: 1}])
def test_an_envelope_with_other_keys_is_refused(keys: dict[Any, Any]) -> None:
    good = {"s": 1, "t": "pause", "r": RUN, "b": b"\x80", "g": b""}
    with pytest.raises(MalformedMessage):
        decode(msgpack.packb({**good, **keys}), RUN)


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x93\x01\x02\x03", b"\x80", b"\x85", b"\xd6\xff\x00\x00\x00\x00"])
def test_what_is_no_map_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode(data, RUN)


PROGRESS = {
    "incarnation": 1, "steps": 1, "step_s": 0.1, "loss": 1.0, "adopted": [0], "held": [1],
    "processed": 1, "discarded": [0], "pending": [1], "read": 1,
}  # fmt: skip


def test_a_plain_report_is_taken() -> None:
    assert isinstance(decode(envelope(dict(PROGRESS), t="progress"), RUN), messages.Progress)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("loss", math.nan),
        ("loss", math.inf),
        ("step_s", math.nan),
        ("step_s", -1.0),
        ("steps", -1),
        ("steps", 2**60),
        ("steps", 1.5),
        ("steps", "1"),
        ("steps", True),
        ("processed", -5),
        ("incarnation", -1),
        ("processed", 2**48 + 1),
        ("adopted", [-2]),
        ("pending", [-1]),
        ("adopted", 7),
        ("adopted", ["0"]),
        ("adopted", [0] * 1025),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(field: str, bad: object) -> None:
    with pytest.raises(MalformedMessage, match=rf"progress\.{field}"):
        decode(envelope({**PROGRESS, field: bad}, t="progress"), RUN)


@pytest.mark.parametrize("tokens", [0, -1, 2**40 + 1])
def test_a_contribution_has_at_least_one_token_and_no_absurd_number(tokens: int) -> None:
    claim = messages.Claim(
        owner="w", id="a", bytes=0, chunk_bytes=1, codec="fp32", hashes=[bytes(32)], digest=bytes(32)
    )
    figures = messages.Figures(processed=0, discarded=0, pending=0)
    with pytest.raises(ValidationError, match="tokens"):
        messages.Contribution(
            incarnation=1, fragment=0, timeline="", base=0, base_digest=bytes(32), round=1, tokens=tokens, steps=1,
            figures=figures, claim=claim,
        )  # fmt: skip


def test_a_role_that_there_is_not_is_refused() -> None:
    with pytest.raises(MalformedMessage, match=r"register\.role"):
        decode(envelope({"nonce": bytes(16), "name": "a", "role": "leader"}, t="register"), RUN)


@pytest.mark.parametrize("bad", ["", "a b", "a/b", "a:b", "ä", "a" * 65, "a\n", "../x", "{a}"])
def test_a_name_that_could_leave_its_key_is_refused(bad: str) -> None:
    with pytest.raises(MalformedMessage, match=r"register\.name"):
        decode(envelope({"nonce": bytes(16), "name": bad}, t="register"), RUN)


@pytest.mark.parametrize("blob_id", ["", "AB", "g", "a:0", "a" * 65])
def test_a_blobs_id_is_lower_case_hex(blob_id: str) -> None:
    with pytest.raises(ValidationError):
        messages.Claim(owner="w", id=blob_id, bytes=0, chunk_bytes=1, codec="fp32", hashes=[], digest=bytes(32))


@pytest.mark.parametrize("text", ["line\nbreak", "\x1b[31mred", "bell\a", "right\u202eleft"])
def test_free_text_cannot_steer_a_terminal(text: str) -> None:
    heard = decode(envelope({"reason": text}, t="stop"), RUN)
    assert isinstance(heard, messages.Stop)
    assert heard.reason.isprintable()
    assert len(heard.reason) == len(text)


def test_a_damaged_record_is_a_message_error() -> None:
    for data in (b"", b"\xc1", b"\x91" * 5000, b"\x01\x02"):
        with pytest.raises(MalformedMessage, match="not msgpack"):
            messages.unpack(data)


def test_messages_do_not_change() -> None:
    message = messages.Stop(reason="done")
    with pytest.raises(ValidationError, match="frozen"):
        message.reason = "other"  # type: ignore[misc]
