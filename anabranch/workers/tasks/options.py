"""A task's options from the run's spec into a dataclass, checked: unknown names, wrong types, impossible values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from anabranch.errors import SpecError

T = TypeVar("T")


def read_options(kind: type[T], options: Mapping[str, Any], task: str) -> T:
    """`kind` is a dataclass whose fields have defaults, and whose types are those of the defaults.

    `SpecError` names the key, the value and what is allowed.
    """
    fields: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    types = {entry.name: type(entry.default) for entry in fields}
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in types:
            raise SpecError(
                f"task.options.{name} = {value!r} is unknown: the task {task} knows {', '.join(sorted(types))}"
            )
        wanted = types[name]
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted or (isinstance(value, float) and not math.isfinite(value)):
            raise SpecError(f"task.options.{name} = {value!r} is not of type {wanted.__name__}")
        values[name] = value
    return kind(**values)


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """`SpecError` unless it `holds`."""
    if not holds:
        raise SpecError(f"task.options.{name} = {value!r}: it must be {allowed}")
