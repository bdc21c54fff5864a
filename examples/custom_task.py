"""A task of your own: the model of nanogpt_loop.py, for `anabranch worker`, `evaluator` and `sample`.

    export PYTHONPATH=examples
    anabranch up --dir runs/nano --set task.name=custom_task:NanoTask
    anabranch worker URL
    anabranch evaluator URL --prompt 'def '
    anabranch sample runs/nano

docs/tasks.md says what a task is. Workers that run nanogpt_loop.py take part in the same run: the model is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from nanogpt_loop import BATCH, CONTEXT, NanoGPT, read_text, windows
from torch.nn import functional

from anabranch.errors import SpecError
from anabranch.workers.shards import TokenWindows
from anabranch.workers.tasks.base import TokenBatch


class NanoTask:
    """Options: `text`, a folder (by default some of Python's own sources), and `learning_rate`."""

    batch = BATCH  # windows per step, out of `dataset`

    def __init__(self, options: dict[str, Any]) -> None:
        if unknown := set(options) - {"text", "learning_rate"}:
            raise SpecError(f"task.options.{min(unknown)} is unknown: NanoTask knows learning_rate, text")
        self._folder = Path(options["text"]) if "text" in options else None
        self._rate = float(options.get("learning_rate", 3e-3))

    def build_model(self, device: torch.device | str = "cpu") -> NanoGPT:
        return NanoGPT().to(device)

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self._rate)

    def learning_rate(self, global_tokens: int) -> float:
        return self._rate

    def loss(self, model: torch.nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Mean nats per byte."""
        return functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())

    def dataset(self) -> TokenWindows:
        """What all workers share: the run hands it out, each window once per epoch."""
        text = read_text(self._folder).numpy()
        return TokenWindows(text, CONTEXT, hashlib.sha256(text.data).hexdigest())

    def batches(self, seed: int, worker: str) -> Iterator[TokenBatch]:
        """What a worker trains on with --own-data."""
        own = int.from_bytes(hashlib.sha256(f"{seed}:{worker}".encode()).digest()[:7], "big")
        for rows in windows(read_text(self._folder), own):
            yield TokenBatch.of(rows.numpy())

    def heldout_batches(self) -> list[TokenBatch]:
        text = read_text(self._folder, heldout=True)
        rows = windows(text, seed=0)
        return [TokenBatch.of(next(rows).numpy()) for _ in range(4)]

    @torch.inference_mode()
    def sample(self, model: torch.nn.Module, prompt: str, length: int, temperature: float, seed: int) -> str:
        """For `anabranch sample` and `evaluator --prompt`; a task may leave it out."""
        device = next(model.parameters()).device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt.encode() or b"\n")
        start = len(text)
        for _ in range(length):
            logits = model(torch.tensor([text[-CONTEXT:]], device=device))[0, -1].cpu()  # [256]
            chances = torch.softmax(logits / max(temperature, 1e-3), dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
        return bytes(text[start:]).decode(errors="replace")
