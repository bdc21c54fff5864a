"""The run's typed definition: what `run.toml` may say, its defaults, and what may change while it runs.

An unknown key, a wrong type or an impossible combination is a `SpecError` that names the key, the value seen and what
is allowed. Where settings come from is in `settings.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anabranch.errors import SpecError
from anabranch.merge.names import Codec, Rule

ID_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"

#: What `anabranch set` may change while the run goes on; everything else is in the hash joiners compare.
MUTABLE = frozenset(
    {
        "rounds.quorum",
        "rounds.inner_steps",
        "rounds.later_inner_steps",
        "rounds.later_from_tokens",
        "rounds.grace_factor",
        "rounds.grace_cap_s",
        "data.epochs",
    }
)

#: Settings and sections that members of older message schemas do not know, and the first that does. A run of such a
#: schema has their defaults.
_SINCE: dict[str, int] = {}

Positive = Annotated[float, Field(gt=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RoundsSpec(_Section):
    """When a round opens and how long it waits (DESIGN section 4)."""

    fragments: Annotated[int, Field(ge=1, le=1024)] = 8  # P; a heartbeat lists them within one envelope
    inner_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 8  # H: every fragment once per H inner steps
    later_inner_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None  # H, once so many tokens are merged:
    later_from_tokens: Annotated[int, Field(ge=0, le=2**53)] = 0
    in_flight: Annotated[int, Field(ge=1, le=64)] = 2  # τ: rounds open at the same time
    quorum: Annotated[int, Field(ge=1, le=10_000)] | Literal["all"] = 1  # K; "all": everyone called
    grace_factor: Annotated[float, Field(ge=0, le=1)] = 0.8  # γ: share of the slack spent waiting
    grace_cap_s: Annotated[float, Field(ge=0)] | None = None  # None: one interval, (H/P)·ξ_step
    deadline_intervals: Positive = 4.0
    deadline_min_s: Positive = 10.0

    @model_validator(mode="after")
    def _every_fragment_fits(self) -> Self:
        for key, steps in (("inner_steps", self.inner_steps), ("later_inner_steps", self.later_inner_steps)):
            if steps is not None and self.in_flight * steps < self.fragments:
                msg = (
                    f"in_flight × {key} = {self.in_flight} × {steps} is below fragments = "
                    f"{self.fragments}: some fragment could never be synchronized within {key}; "
                    f"raise {key} or in_flight, or lower fragments"
                )
                raise ValueError(msg)
        return self

    @property
    def interval_steps(self) -> float:
        """H/P: inner steps between two openings."""
        return self.inner_steps / self.fragments


COUNTER = "num_batches_tracked"
_RUNNING = ("running_mean", "running_var", COUNTER)  # what normalisation layers of torch call them


def is_running(name: str) -> bool:
    """Whether a buffer of this name is a running statistic of a normalisation layer, or counts its batches."""
    return name.endswith(_RUNNING)


class MergeSpec(_Section):
    """How contributions become an outer gradient, and the outer step (DESIGN section 5)."""

    matrix: Rule = "radial"
    embedding: Rule = "radial"
    embedding_tensors: tuple[str, ...] = ("*embed*", "*emb.weight", "*wte*", "*wpe*")  # shell-style patterns
    buffers: tuple[str, ...] | None = None  # names, as patterns, of those that travel; None: see `carries`
    outer_lr: Annotated[float, Field(gt=0, le=10)] = 1.0
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def is_embedding(self, tensor: str) -> bool:
        """Whether a tensor of this name is an embedding; a rule of names, so every member decides alike."""
        return any(fnmatchcase(tensor, pattern) for pattern in self.embedding_tensors)

    def carries(self, buffer: str, *, whole: bool = False) -> bool:
        """Whether a buffer of this name travels. Unless `buffers` says which, all do where the `whole` model is
        trained; where a part of it is frozen, only what normalisation layers change: others belong to the base, which
        each member has (and may have quantized)."""
        if self.buffers is None:
            return whole or is_running(buffer)
        return any(fnmatchcase(buffer, pattern) for pattern in self.buffers)


class WorkersSpec(_Section):
    """What every member follows."""

    adoption: Literal["overwrite", "blend", "rebase"] = "rebase"
    blend_alpha: Annotated[float, Field(ge=0, lt=1)] = 0.5  # share of the live parameters that `blend` keeps
    rebase_above: Annotated[float, Field(ge=0, lt=1)] = 0.1  # share of unmerged work from which on `rebase` keeps it
    codec: Codec = "bf16"
    heartbeat_s: Annotated[float, Field(ge=0.05, le=3600)] = 1.0  # gone after 3 without one
    stuck_after_steps: Annotated[float, Field(ge=2)] = 10.0  # no step for this many usual step times: stuck
    min_step_s: Annotated[float, Field(gt=0)] = 0.0005  # claimed steps are capped at one per this time


class LimitsSpec(_Section):
    """What a member may cost the run."""

    max_members: Annotated[int, Field(ge=1, le=8192)] = 1024  # a call names them within one envelope
    max_delta_norm: Positive | None = None
    blob_ttl_s: Annotated[float, Field(ge=5)] = 600.0
    superseded_ttl_s: Annotated[float, Field(ge=1)] = 60.0
    broadcast_length: Annotated[int, Field(ge=100)] = 4096
    tape_length: Annotated[int, Field(ge=100)] = 20_000


class LeaderSpec(_Section):
    lease_s: Annotated[float, Field(ge=0.2, le=3600)] = 5.0


class CheckpointSpec(_Section):
    every_s: Positive | None = 300.0
    keep: Annotated[int, Field(ge=1)] = 3


class DataSpec(_Section):
    """How a shared dataset is cut into ranges and handed out (`orchestrator/ranges.py`)."""

    range_items: Annotated[int, Field(ge=1, le=2**31)] | None = None  # None: by the dataset's size
    epochs: Annotated[int, Field(ge=1)] | None = None  # the run stops after so many; None: it goes on


class TaskSpec(_Section):
    """What workers train; the synchronizer does not look inside."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,200}$")] = "gpt"
    options: dict[str, Any] = Field(default_factory=dict)


class RunSpec(_Section):
    """One run's definition. Immutable settings decide `hash`; joiners compare it."""

    name: Annotated[str, Field(pattern=ID_PATTERN)] = "run"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    rounds: RoundsSpec = RoundsSpec()
    merge: MergeSpec = MergeSpec()
    workers: WorkersSpec = WorkersSpec()
    limits: LimitsSpec = LimitsSpec()
    leader: LeaderSpec = LeaderSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    data: DataSpec = DataSpec()
    task: TaskSpec = TaskSpec()

    @property
    def hash(self) -> str:
        """SHA-256 (hex) over the immutable settings, in a canonical form."""
        data = self.model_dump(mode="json")
        for key in MUTABLE:
            section, field = key.split(".")
            data[section].pop(field)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def changed(self, key: str, value: object) -> RunSpec:
        """A copy with one mutable setting changed; `SpecError` for any other key or a bad value."""
        check_mutable(key, value)
        data = self.model_dump()
        section, field = key.split(".")
        data[section][field] = value
        return parse_spec(data)

    def to_wire(self, schema: int) -> dict[str, Any]:
        """Plain values for readers of a message schema: those of an older one know, and refuse, fewer keys."""
        data = self.model_dump(mode="json")
        for key, since in _SINCE.items():
            if schema < since:
                section, _, field = key.partition(".")
                (data[section] if field else data).pop(field or section)
        return data

    def to_toml(self) -> str:
        """What is in force, as `run.toml` would say it (`--print-config`)."""
        return "\n".join(_toml_lines(self.model_dump(mode="json"))) + "\n"


def check_mutable(key: str, value: object) -> None:
    """`SpecError` if `anabranch set` cannot change this in any run."""
    if key in MUTABLE:
        return
    node: Any = RunSpec().model_dump()
    for part in key.split("."):
        node = node.get(part, key) if isinstance(node, dict) else key
    near = get_close_matches(key, MUTABLE, 1)
    if node == key and near:
        raise SpecError(f"{key} = {value!r}: unknown key; did you mean {near[0]}?")
    why = "unknown key" if node == key else "cannot change while the run goes on"
    raise SpecError(f"{key} = {value!r}: {why}; allowed: {', '.join(sorted(MUTABLE))}")


def parse_spec(data: Mapping[str, Any]) -> RunSpec:
    """Validate a nested mapping. Errors list every offending key at once."""
    try:
        return RunSpec.model_validate(_lists_to_tuples(data))
    except ValidationError as error:
        raise SpecError(_explain(error)) from None


def _lists_to_tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """TOML and JSON have lists where the strict model wants tuples, and integers where it wants floats."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping) and key != "options":
            result[key] = _lists_to_tuples(value)
        elif isinstance(value, list):
            result[key] = tuple(value)
        else:
            result[key] = value
    return result


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"] if not _is_union_tag(part)) or "spec"
        if item["type"] == "extra_forbidden":
            lines.append(f"{key} = {item['input']!r}: unknown key; allowed here: {_allowed_keys(item['loc'])}")
        elif item["type"] == "value_error":
            lines.append(f"{key}: {item['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(f"{key} = {item['input']!r}: {item['msg'][0].lower()}{item['msg'][1:]}")
    return "; ".join(dict.fromkeys(lines))


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and (not part.isidentifier() or part in {"int", "float"})


def _allowed_keys(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = RunSpec
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            break
        model = annotation
    return ", ".join(sorted(model.model_fields))


def _toml_lines(data: Mapping[str, Any], path: str = "") -> Iterable[str]:
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    for key, value in data.items():
        if value is None:
            yield f'{key} = "none"'
        elif key not in tables:
            text = json.dumps(value, ensure_ascii=False)  # TOML knows no surrogate pairs
            yield f"{key} = {text.replace(chr(127), chr(92) + 'u007f')}"
    for key, value in tables.items():
        yield ""
        yield f"[{path}{key}]"
        yield from _toml_lines(value, f"{path}{key}.")
