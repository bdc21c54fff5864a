"""Tasks by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from anabranch.errors import SpecError
from anabranch.spec import TaskSpec

if TYPE_CHECKING:
    from anabranch.workers.tasks.base import Task

BUILT_IN = {"gpt": "anabranch.workers.tasks.gpt:GPTTask", "hf": "anabranch.workers.tasks.hf:HFTask"}
SYNTHETIC = "synthetic"


def load_task(task: TaskSpec, override: str | None = None, options: Mapping[str, Any] | None = None) -> Task:
    """The run's task: a built-in name or `package.module:Class`, called with the run's options, of which `options`
    replace some on this machine."""
    name = override or task.name
    path = BUILT_IN.get(name, name)
    module_name, _, class_name = path.partition(":")
    if not class_name:
        known = ", ".join([*BUILT_IN, SYNTHETIC])
        raise SpecError(f"task.name = {name!r}: unknown; allowed: {known}, or package.module:Class")
    try:
        factory: Callable[[dict[str, Any]], Task] = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"task.name = {name!r}: cannot be imported: {error}") from None
    return factory({**task.options, **(options or {})})
