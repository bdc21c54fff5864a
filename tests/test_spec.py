"""A run's definition: what is refused and how, who overrides whom, what the hash covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.errors import SpecError
from anabranch.settings import load_spec, parse_value
from anabranch.spec import MUTABLE, RunSpec, parse_spec


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"colour": 1}, r"colour = 1: unknown key; allowed here: checkpoint, data, leader, limits"),
        ({"rounds": {"quorums": 2}}, r"rounds\.quorums = 2: unknown key; allowed here: .*quorum"),
        ({"rounds": {"inner_steps": "24"}}, r"rounds\.inner_steps = '24': input should be a valid integer"),
        ({"rounds": {"inner_steps": 2.5}}, r"rounds\.inner_steps = 2\.5"),
        ({"rounds": {"inner_steps": True}}, r"rounds\.inner_steps = True"),
        ({"rounds": {"quorum": 0}}, r"rounds\.quorum = 0"),
        ({"rounds": {"quorum": "some"}}, r"rounds\.quorum = 'some'"),
        ({"rounds": 5}, r"rounds = 5"),
        ({"merge": {"outer_momentum": 1.0}}, r"merge\.outer_momentum = 1\.0: input should be less than 1"),
        ({"merge": {"outer_lr": float("nan")}}, r"merge\.outer_lr = nan"),
        ({"workers": {"codec": "fp8"}}, r"workers\.codec = 'fp8': input should be 'fp32', 'bf16' or 'fp16'"),
        ({"name": "a/b"}, r"name = 'a/b'"),
        ({"name": "a\n"}, r"name = "),
        ({"task": {"name": "a b"}}, r"task\.name = 'a b'"),
    ],
)
def test_what_cannot_be_is_named_with_its_value(data: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        parse_spec(data)


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(SpecError, match=r"rounds\.fragments.*; .*rounds\.inner_steps"):
        parse_spec({"rounds": {"fragments": "x", "inner_steps": "y"}})


def test_every_fragment_must_fit_into_its_inner_steps() -> None:
    parse_spec({"rounds": {"fragments": 8, "inner_steps": 4, "in_flight": 2}})
    with pytest.raises(SpecError, match=r"in_flight × inner_steps = 2 × 4 is below fragments = 9"):
        parse_spec({"rounds": {"fragments": 9, "inner_steps": 4, "in_flight": 2}})


def test_argument_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rounds]\nquorum = 2\ninner_steps = 20\nin_flight = 3\n")
    environment = {"ANABRANCH_ROUNDS__QUORUM": "3", "ANABRANCH_ROUNDS__INNER_STEPS": "30", "OTHER__THING": "9"}
    spec = load_spec(file, overrides=["rounds.quorum = 4"], environment=environment)
    assert spec.rounds.quorum == 4
    assert spec.rounds.inner_steps == 30
    assert spec.rounds.in_flight == 3
    assert spec.rounds.fragments == RunSpec().rounds.fragments


def test_our_other_variables_are_no_settings() -> None:
    others = {"ANABRANCH_URL": "redis://x", "ANABRANCH_FAIL_AT": "after merge:1:kill", "ANABRANCH_SEED": "1"}
    assert load_spec(environment=others) == RunSpec()


def test_a_mistyped_variable_is_no_default() -> None:
    with pytest.raises(SpecError, match=r"rounds\.quorums = 3: unknown key"):
        load_spec(environment={"ANABRANCH_ROUNDS__QUORUMS": "3"})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("0.5", 0.5),
        ("true", True),
        ('"2"', "2"),
        ("all", "all"),
        ("none", None),
        ("None", None),
        ("[1, 2]", [1, 2]),
        ("gpt:Task", "gpt:Task"),
        ("", ""),
    ],
)
def test_values_on_a_command_line(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize("item", ["rounds.quorum", "=", "rounds.quorum.x=1", "=5", "rounds=1"])
def test_an_override_that_makes_no_sense_is_refused(item: str) -> None:
    with pytest.raises(SpecError):
        load_spec(overrides=["rounds.quorum=1", item], environment={})


@pytest.mark.parametrize("content", [b"[rounds\n", b"\xff\xfe", b"a = b"])
def test_what_is_no_toml_is_refused_naming_the_file(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(content)
    with pytest.raises(SpecError, match=r"run\.toml: not valid TOML"):
        load_spec(file, environment={})


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file; write one with"):
        load_spec(tmp_path / "run.toml", environment={})
    with pytest.raises(SpecError, match="cannot be read"):
        load_spec(tmp_path, environment={})


plain = st.characters(codec="utf-8", exclude_categories=["Cs"])
specs = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**31 - 1),
        "rounds": st.fixed_dictionaries(
            {},
            optional={
                "quorum": st.integers(1, 100) | st.just("all"),
                "inner_steps": st.integers(8, 1000),
                "grace_factor": st.floats(0, 1),
                "grace_cap_s": st.none() | st.floats(0, 1e6),
            },
        ),
        "merge": st.fixed_dictionaries(
            {}, optional={"embedding_tensors": st.lists(st.text(plain, max_size=8), max_size=3)}
        ),
        "limits": st.fixed_dictionaries({}, optional={"max_delta_norm": st.none() | st.floats(1e-6, 1e6)}),
        "checkpoint": st.fixed_dictionaries({}, optional={"every_s": st.none() | st.floats(1e-3, 1e6)}),
        "task": st.fixed_dictionaries(
            {
                "options": st.dictionaries(
                    st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.integers() | st.text(plain)
                )
            }
        ),
    },
)


@settings(max_examples=60)
@given(specs)
def test_what_is_printed_can_be_read_again(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    spec = parse_spec(data)
    file = tmp_path_factory.getbasetemp() / "printed.toml"
    file.write_text(spec.to_toml(), encoding="utf-8", newline="")
    again = load_spec(file, environment={})
    assert again == spec
    assert again.hash == spec.hash


def test_none_can_be_printed_and_read(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(parse_spec({"checkpoint": {"every_s": None}}).to_toml())
    assert load_spec(file, environment={}).checkpoint.every_s is None


CHANGES: dict[str, object] = {
    "rounds.quorum": 7,
    "rounds.inner_steps": 99,
    "rounds.later_inner_steps": 99,
    "rounds.later_from_tokens": 1000,
    "rounds.grace_factor": 0.1,
    "rounds.grace_cap_s": 3.0,
    "rounds.fragments": 4,
    "rounds.in_flight": 3,
    "rounds.deadline_intervals": 9.0,
    "rounds.deadline_min_s": 1.0,
    "merge.matrix": "average",
    "merge.embedding": "average",
    "merge.outer_lr": 0.1,
    "merge.outer_momentum": 0.1,
    "workers.codec": "fp32",
    "workers.heartbeat_s": 2.0,
    "workers.adoption": "blend",
    "workers.blend_alpha": 0.25,
    "data.range_items": 8,
    "data.epochs": 2,
    "limits.max_members": 3,
    "limits.max_delta_norm": 1.0,
    "leader.lease_s": 1.0,
    "checkpoint.keep": 9,
    "task.name": "synthetic",
    "name": "other",
    "seed": 1,
}


@pytest.mark.parametrize("key", CHANGES)
def test_the_hash_covers_all_but_what_may_change(key: str) -> None:
    section, _, field = key.partition(".")
    data = {section: {field: CHANGES[key]}} if field else {section: CHANGES[key]}
    changed = parse_spec(data)
    assert changed != RunSpec()
    assert (changed.hash == RunSpec().hash) == (key in MUTABLE)


def test_what_may_change_is_changed_in_a_copy() -> None:
    spec = RunSpec()
    for key in sorted(MUTABLE):
        changed = spec.changed(key, CHANGES[key])
        section, field = key.split(".")
        assert getattr(getattr(changed, section), field) == CHANGES[key]
        assert changed.hash == spec.hash
    assert spec == RunSpec()


@pytest.mark.parametrize("key", ["rounds.fragments", "merge.outer_lr", "name", "rounds"])
def test_nothing_else_changes(key: str) -> None:
    with pytest.raises(
        SpecError, match=r"cannot change while the run goes on; allowed: data\.epochs, rounds\.grace_cap_s"
    ):
        RunSpec().changed(key, 1)


@pytest.mark.parametrize("key", ["rounds.qorum", "round.quorum", "quorum"])
def test_a_misspelt_key_is_unknown_and_the_near_one_is_named(key: str) -> None:
    with pytest.raises(SpecError, match=rf"{key} = 1: unknown key; did you mean rounds\.quorum\?"):
        RunSpec().changed(key, 1)


@pytest.mark.parametrize("key", ["nonsense", "nonsense.x", "rounds.", "", "rounds.quorum.x.y"])
def test_an_unknown_key_is_said_to_be_so(key: str) -> None:
    with pytest.raises(SpecError, match=r"unknown key; (allowed: data\.epochs|did you mean)"):
        RunSpec().changed(key, 1)


@pytest.mark.parametrize("value", [0, -1, "few", 1.5, None])
def test_a_change_to_nonsense_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match=r"rounds\.quorum"):
        RunSpec().changed("rounds.quorum", value)


@pytest.mark.parametrize(
    ("tensor", "embedding"),
    [("wte", True), ("transformer.wte.weight", True), ("model.embed_tokens.weight", True), ("head.weight", False)],
)
def test_embeddings_are_told_by_their_names(tensor: str, embedding: bool) -> None:
    assert RunSpec().merge.is_embedding(tensor) == embedding
