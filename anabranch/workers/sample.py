"""Text from a trained model, and loading one from a checkpoint.

A task of one's own can be sampled if it has a method `sample(model, prompt, length, temperature, seed) -> str`: what
comes after the prompt, `length` in units of the task's own (bytes, tokens).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anabranch.checkpoints.reading import read_checkpoint
from anabranch.errors import CheckpointError, UsageError
from anabranch.model import Float32, unflatten
from anabranch.spec import parse_spec
from anabranch.workers.tasks.base import Task
from anabranch.workers.tasks.gpt import GPT, GPTConfig, GPTTask
from anabranch.workers.tasks.named import BUILT_IN, load_task
from anabranch.workers.torch_store import trainable


@torch.inference_mode()
def generate(
    model: GPT, config: GPTConfig, prompt: bytes, max_new_bytes: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """`max_new_bytes` bytes that the model continues `prompt` with (the prompt itself is not returned).

    The same seed gives the same bytes on one machine. At temperature 0 the likeliest byte is always taken. An
    empty prompt starts from a newline, as if at the start of a file.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    text = list(prompt or b"\n")
    start = len(text)
    for _ in range(max_new_bytes):
        window = torch.tensor([text[-config.context :]], device=device)  # [1, T]
        logits = model(window)[0, -1].float().cpu()  # [256]
        if temperature <= 0:
            text.append(int(logits.argmax()))
            continue
        chances = torch.softmax(logits / temperature, dim=0)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text[start:])


def load_checkpoint_model(
    where: str | Path, task: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Any, torch.nn.Module]:
    """The task and the trained model of a checkpoint, or of a run directory's newest one (folder or URL).

    `task` and `options` go before what the run's spec says, as for `anabranch worker`. CheckpointError when something
    is missing, damaged or of a task that cannot be had here; SpecError for unknown options.
    """
    restored = read_checkpoint(where, momenta=False)
    spec = parse_spec(restored.manifest["spec"]).task
    if task is None and ":" not in spec.name and spec.name not in BUILT_IN:
        raise CheckpointError(f"{restored.location}: spec.task.name is {spec.name!r}, which has no model to load")
    loaded = load_task(spec, task, options)
    model = loaded.build_model()
    _fill(model, unflatten(restored.layout, restored.thetas), restored.location)
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
    if not isinstance(task, GPTTask) and not hasattr(task, "sample"):
        raise UsageError(
            f"{type(task).__name__} cannot be sampled: give it a method `sample(model, prompt, length, temperature, "
            "seed) -> str`"
        )
    training = model.training
    model.eval()
    try:
        if isinstance(task, GPTTask) and isinstance(model, GPT):
            text = generate(model, task.config, prompt.encode(), length, temperature, seed)
            return text.decode(errors="replace")
        sampled: str = getattr(task, "sample")(model, prompt, length, temperature, seed)  # noqa: B009
        return sampled
    finally:
        model.train(training)


def _fill(model: torch.nn.Module, tensors: dict[str, Float32], location: str) -> None:
    """Copy every tensor into the parameter of its name, in the parameter's dtype."""
    parameters = dict(trainable(model))
    if differing := sorted(parameters.keys() ^ tensors.keys()):
        where = "lacks" if differing[0] in parameters else "has the unknown"
        raise CheckpointError(f"{location} {where} tensor {differing[0]!r} (one of {len(differing)})")
    with torch.no_grad():
        for name, parameter in parameters.items():
            found = torch.from_numpy(tensors[name])
            if found.shape != parameter.shape:
                raise CheckpointError(
                    f"{location}: {name} has shape {tuple(found.shape)}, the model needs {tuple(parameter.shape)}"
                )
            parameter.copy_(found)
