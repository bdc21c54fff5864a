"""Text from a trained model, and loading one from a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from anabranch.errors import CheckpointError
from anabranch.workers.tasks.gpt import GPT, GPTConfig, GPTTask

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "theta.safetensors"


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


def load_checkpoint_model(directory: Path) -> tuple[GPTTask, GPT]:
    """The task and the trained model of a checkpoint folder (`manifest.json`, `theta.safetensors`).

    CheckpointError when something is missing, damaged or of another task; SpecError for unknown options.
    """
    options = _gpt_options(directory / MANIFEST_NAME)
    task = GPTTask(options)
    model = task.build_model()
    weights = directory / WEIGHTS_NAME
    try:
        tensors = load_file(weights)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {weights}: {error}") from error
    _fill(model, tensors, weights)
    return task, model.eval()


def newest_checkpoint(directory: Path) -> Path:
    """`directory` if it is a checkpoint, else the newest complete one of the run directory it is."""
    if (directory / MANIFEST_NAME).exists():
        return directory
    folder = directory / "checkpoints"
    complete = sorted(path.parent for path in folder.glob(f"[!.]*/{MANIFEST_NAME}"))
    if not complete:
        raise CheckpointError(f"{directory}: neither a checkpoint ({MANIFEST_NAME}) nor a run directory that has one")
    return complete[-1]


def sample_checkpoint(directory: Path, prompt: str, length: int, temperature: float, seed: int) -> str:
    """The prompt and what the checkpointed model makes of it."""
    task, model = load_checkpoint_model(newest_checkpoint(directory))
    start = prompt.encode()
    text = start + generate(model, task.config, start, length, temperature, seed)
    return text.decode(errors="replace")


def _gpt_options(manifest: Path) -> dict[str, Any]:
    try:
        task = json.loads(manifest.read_text(encoding="utf-8"))["spec"]["task"]
        name, options = task["name"], task.get("options", {})
    except OSError as error:
        raise CheckpointError(
            f"{manifest.parent} is no complete checkpoint: {error}; name a folder that has {MANIFEST_NAME}"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{manifest} has no spec.task with a name: {error!r}") from error
    if name != "gpt" or not isinstance(options, dict):
        raise CheckpointError(f"{manifest}: spec.task.name is {name!r}; only a model of the task gpt can be loaded")
    return options


def _fill(model: GPT, tensors: dict[str, torch.Tensor], weights: Path) -> None:
    """Copy every tensor into the parameter of its name, in the parameter's dtype."""
    parameters = dict(model.named_parameters())
    if differing := sorted(parameters.keys() ^ tensors.keys()):
        where = "lacks" if differing[0] in parameters else "has the unknown"
        raise CheckpointError(f"{weights} {where} tensor {differing[0]!r} (one of {len(differing)})")
    with torch.no_grad():
        for name, parameter in parameters.items():
            found = tensors[name]
            if found.shape != parameter.shape:
                raise CheckpointError(
                    f"{weights}: {name} has shape {tuple(found.shape)}, the model needs {tuple(parameter.shape)}"
                )
            parameter.copy_(found)
