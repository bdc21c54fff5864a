"""Text from a trained model, and loading one from a checkpoint.

A task of one's own can be sampled if it has a method `sample(model, prompt, length, temperature, seed) -> str`: what
comes after the prompt, `length` in units of the task's own (bytes, tokens).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from anabranch.checkpoints.reading import read_checkpoint
from anabranch.errors import CheckpointError, UsageError
from anabranch.model import Float32, unflatten
from anabranch.spec import parse_spec
from anabranch.workers.tasks.base import Task
from anabranch.workers.tasks.named import BUILT_IN, load_task
from anabranch.workers.tensors import Buffer, buffers_of, trainable
from anabranch.workers.watching import warn_of_staying


def load_checkpoint_model(
    where: str | Path, task: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Any, torch.nn.Module]:
    """The task and the trained model of a checkpoint, or of a run directory's newest one (folder or URL).

    `task` and `options` go before what the run's spec says, as for `anabranch worker`. CheckpointError when something
    is missing, damaged or of a task that cannot be had here; SpecError for unknown options.
    """
    restored = read_checkpoint(where, momenta=False)
    whole = parse_spec(restored.manifest["spec"])
    spec = whole.task
    if task is None and ":" not in spec.name and spec.name not in BUILT_IN:
        raise CheckpointError(f"{restored.location}: spec.task.name is {spec.name!r}, which has no model to load")
    loaded = load_task(spec, task, options)
    model = loaded.build_model()
    buffers = buffers_of(model, whole.merge)
    _fill(model, buffers, unflatten(restored.layout, restored.thetas), restored.location)
    warn_of_staying(model, buffers, trains=False)
    return loaded, model.eval()


def sample_checkpoint(
    where: str | Path,
    prompt: str,
    length: int,
    temperature: float,
    seed: int,
    *,
    task: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """The prompt and what the checkpointed model makes of it; raises what `load_checkpoint_model` raises."""
    loaded, model = load_checkpoint_model(where, task, options)
    return prompt + continue_text(loaded, model, prompt, length, temperature, seed)


def continue_text(
    task: Task, model: torch.nn.Module, prompt: str, length: int, temperature: float = 0.8, seed: int = 0
) -> str:
    """What the model writes after `prompt`. `UsageError` if the task cannot say."""
    sample: Callable[..., str] | None = getattr(task, "sample", None)
    if sample is None:
        raise UsageError(
            f"{type(task).__name__} cannot be sampled: give it a method `sample(model, prompt, length, temperature, "
            "seed) -> str`"
        )
    training = model.training
    model.eval()
    try:
        return sample(model, prompt, length, temperature, seed)
    finally:
        model.train(training)


def _fill(model: torch.nn.Module, buffers: Mapping[str, Buffer], tensors: dict[str, Float32], location: str) -> None:
    """Copy every tensor into the parameter or buffer of its name, in the dtype that it has there."""
    wanted: dict[str, torch.nn.Parameter | Buffer] = {**dict(trainable(model)), **buffers}
    if differing := sorted(wanted.keys() ^ tensors.keys()):
        where = "lacks" if differing[0] in wanted else "has the unknown"
        raise CheckpointError(f"{location} {where} tensor {differing[0]!r} (one of {len(differing)})")
    with torch.no_grad():
        for name, target in wanted.items():
            found = torch.from_numpy(tensors[name])
            if found.shape != target.shape:
                raise CheckpointError(
                    f"{location}: {name} has shape {tuple(found.shape)}, the model needs {tuple(target.shape)}"
                )
            if isinstance(target, Buffer):
                target.put(found)
            else:
                target.copy_(found)
