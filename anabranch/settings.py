"""Where a run's settings come from.

Order of precedence, highest first: explicit argument (`--set rounds.quorum=2`), environment
(`ANABRANCH_ROUNDS__QUORUM=2`), file (`run.toml`), default.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from anabranch.errors import SpecError
from anabranch.spec import RunSpec, parse_spec

ENVIRONMENT_PREFIX = "ANABRANCH_"


def load_spec(
    path: Path | None = None,
    *,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
) -> RunSpec:
    """Read `run.toml` (or nothing), then the environment, then `section.key=value` overrides."""
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = _read_nones(tomllib.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise SpecError(
                f"--spec {path}: no such file; write one with `anabranch orchestrator --print-config`"
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise SpecError(f"--spec {path}: not valid TOML: {error}") from None
        except OSError as error:
            raise SpecError(f"--spec {path}: cannot be read: {error.strerror}") from None
    for key, value in _from_environment(os.environ if environment is None else environment):
        _assign(data, key, value)
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator:
            raise SpecError(f"--set {item!r}: expected section.key=value, for example rounds.quorum=2")
        _assign(data, key.strip(), parse_value(text.strip()))
    return parse_spec(data)


def parse_value(text: str) -> object:
    """A TOML value if it is one (`2`, `0.5`, `true`, `[1, 2]`), else the bare string; `none` is None."""
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def _read_nones(data: dict[str, Any]) -> dict[str, Any]:
    """TOML has no null: `"none"` in a section stands for it, as `none` does elsewhere."""
    return {
        section: {key: None if value == "none" else value for key, value in values.items()}
        if isinstance(values, dict)
        else values
        for section, values in data.items()
    }


def _from_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, object]]:
    for name, text in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield key, parse_value(text)


def _assign(data: dict[str, Any], key: str, value: object) -> None:
    *path, last = key.split(".")
    for part in path:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise SpecError(f"{key}: {part} is a value, not a section")
    data[last] = value
