"""A byte-level GPT of about one million parameters: what the demo trains, on any machine, from nothing.

The shape was chosen by held-out loss per CPU second on one thread, one seed (1) and a busy machine: 1.86
nats/byte after 30 s, 1.69 after 60, 1.57 after 120, at 62 ms a step. Clear, alone: summing the embeddings of
the last three bytes, which costs no multiplication (30 s: 1.87 against 2.10 with one). Clear, but changed
together: small weights (std 0.02) instead of large embeddings and zeroed outputs (20 s: 2.02 against 2.61).
Other settings differed too: windows of 64 beat 128, untied embeddings beat tied ones. Squared ReLU and rotary
positions were tried only with the poor initial weights, where they gained 0.06 and 0.13.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anabranch.errors import SpecError
from anabranch.workers.data import ByteCorpus, Bytes, load_corpus
from anabranch.workers.shards import TokenWindows, text_folder
from anabranch.workers.tasks.base import CosineSchedule, TokenBatch
from anabranch.workers.tasks.options import read_options

VOCABULARY = 256
HELDOUT_WINDOWS = 128
HELDOUT_BATCH = 32
_INIT_STD = 0.02
_ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig:
    """The options of the task `gpt`, as in `[task.options]` of run.toml. Sizes of windows are in bytes."""

    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    lookback: int = 3  # embeddings summed per position: this byte and the ones before it
    batch: int = 6
    learning_rate: float = 2.5e-3
    final_learning_rate: float = 2.5e-4
    warmup_tokens: int = 15_000
    total_tokens: int = 20_000_000
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    data: str = ""  # a folder of text; empty: the Python standard library's sources

    def __post_init__(self) -> None:
        for name in ("context", "layers", "heads", "width", "lookback", "batch", "total_tokens"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("learning_rate", "final_learning_rate"):
            _require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, at most 1")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0, below 1")
        for name in ("warmup_tokens", "weight_decay"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(
            self.width % (2 * self.heads) == 0, "width", self.width, f"a multiple of 2 × heads = {2 * self.heads}"
        )
        _require(self.lookback <= self.context, "lookback", self.lookback, f"at most context = {self.context}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> GPTConfig:
        """Check names and types of the options; SpecError names the key, the value and what is allowed."""
        return read_options(cls, options, "gpt")


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise SpecError(f"task.options.{name} = {value!r}: it must be {allowed}")


class _Block(nn.Module):
    """Attention and feed-forward, each behind a norm and on the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_up = nn.Linear(width, 4 * width, bias=False)
        self.mlp_down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # [B, heads, T, width/heads]
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, cos, sin), _rotate(key, cos, sin), value, is_causal=True
        )
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        hidden = functional.relu(self.mlp_up(self.mlp_norm(x))).square()
        return x + self.mlp_down(hidden)  # type: ignore[no-any-return]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = nn.ModuleList(nn.Embedding(VOCABULARY, config.width) for _ in range(config.lookback))
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        half = config.width // config.heads // 2
        frequencies = _ROPE_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(config.context, dtype=torch.float32)[:, None] * frequencies  # [T, half]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        # What writes to the residual stream starts smaller, the more blocks write to it.
        residual = _INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                small = name.endswith(("attention_out.weight", "mlp_down.weight"))
                nn.init.normal_(parameter, std=residual if small else _INIT_STD)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, 256] for `inputs`, int64 [B, T] with T ≤ context."""
        length = inputs.shape[1]
        x: torch.Tensor = self.embeddings[0](inputs)  # [B, T, width]
        for back in range(1, min(len(self.embeddings), length)):
            x = x + functional.pad(self.embeddings[back](inputs[:, :-back]), (0, 0, back, 0))
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: torch.Tensor = self.head(self.final_norm(x))
        return logits


class GPTTask:
    """The task `gpt` (a `base.Task`): byte-level language modelling of a folder of text."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.config = GPTConfig.from_options(options or {})
        self._schedule = CosineSchedule(
            self.config.learning_rate,
            self.config.final_learning_rate,
            self.config.warmup_tokens,
            self.config.total_tokens,
        )

    def build_model(self, device: torch.device | str = "cpu") -> GPT:
        """Built on the CPU and then moved, so that one torch seed gives the same values on every device."""
        return GPT(self.config).to(device)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; norms' gains are not decayed."""
        matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
        gains = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.config.weight_decay},
                {"params": gains, "weight_decay": 0.0},
            ],
            lr=self.learning_rate(0),
            betas=(self.config.beta1, self.config.beta2),
            fused=True,
        )

    def batches(self, seed: int, worker: str) -> Iterator[TokenBatch]:
        """Random windows of the training text, drawn by a generator of (seed, worker)."""
        digest = hashlib.sha256(f"{seed}:{worker}".encode()).digest()
        rng = np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))
        corpus = self._corpus()
        while True:
            yield _batch(corpus.random_windows(rng, self.config.batch, self.config.context))

    @property
    def batch(self) -> int:
        return self.config.batch

    def dataset(self) -> TokenWindows:
        """The training text in windows of `context` bytes."""
        return text_folder(self._folder(), self.config.context)

    def loss(self, model: nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Mean cross entropy in nats per byte."""
        logits: torch.Tensor = model(batch.inputs)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def heldout_batches(self) -> list[TokenBatch]:
        """128 windows spread evenly over the held-out files."""
        windows = self._corpus().heldout_windows(HELDOUT_WINDOWS, self.config.context)
        return [_batch(windows[at : at + HELDOUT_BATCH]) for at in range(0, HELDOUT_WINDOWS, HELDOUT_BATCH)]

    def learning_rate(self, global_tokens: int) -> float:
        """Warm-up and cosine over the run's merged tokens."""
        return self._schedule.at(global_tokens)

    def _corpus(self) -> ByteCorpus:
        return load_corpus(self._folder())

    def _folder(self) -> Path | None:
        return Path(self.config.data) if self.config.data else None


def _batch(windows: Bytes) -> TokenBatch:
    return TokenBatch.of(windows.astype(np.int64))
