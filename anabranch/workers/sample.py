"""Text from a trained model, and loading one from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anabranch.checkpoints.reading import Restored, read_checkpoint
from anabranch.errors import CheckpointError
from anabranch.model import Float32, unflatten
from anabranch.spec import parse_spec
from anabranch.workers.tasks.gpt import GPT, GPTConfig, GPTTask


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


def load_checkpoint_model(where: str | Path) -> tuple[GPTTask, GPT]:
    """The task and the trained model of a checkpoint, or of a run directory's newest one (folder or URL).

    CheckpointError when something is missing, damaged or of another task; SpecError for unknown options.
    """
    restored = read_checkpoint(where, momenta=False)
    task = GPTTask(_gpt_options(restored))
    model = task.build_model()
    _fill(model, unflatten(restored.layout, restored.thetas), restored.location)
    return task, model.eval()


def sample_checkpoint(where: str | Path, prompt: str, length: int, temperature: float, seed: int) -> str:
    """The prompt and what the checkpointed model makes of it."""
    task, model = load_checkpoint_model(where)
    start = prompt.encode()
    text = start + generate(model, task.config, start, length, temperature, seed)
    return text.decode(errors="replace")


def _gpt_options(restored: Restored) -> dict[str, Any]:
    task = parse_spec(restored.manifest["spec"]).task
    if task.name != "gpt":
        raise CheckpointError(
            f"{restored.location}: spec.task.name is {task.name!r}; only a model of the task gpt can be loaded"
        )
    return task.options


def _fill(model: GPT, tensors: dict[str, Float32], location: str) -> None:
    """Copy every tensor into the parameter of its name, in the parameter's dtype."""
    parameters = dict(model.named_parameters())
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
