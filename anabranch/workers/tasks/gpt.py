"""A byte-level GPT of about one million parameters: what the demo trains, on any machine, from nothing.

The shape was chosen by held-out loss per CPU second on one thread, one seed (1) and a busy machine: 1.86
nats/byte after 30 s, 1.69 after 60, 1.57 after 120, at 62 ms a step. Clear, alone: summing the embeddings of
the last three bytes, which costs no multiplication (30 s: 1.87 against 2.10 with one). Clear, but changed
together: small weights (std 0.02) instead of large embeddings and zeroed outputs (20 s: 2.02 against 2.61).
Other settings differed too: windows of 64 beat 128, untied embeddings beat tied ones. Squared ReLU and rotary
positions were tried only with the poor initial weights, where they gained 0.06 and 0.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from anabranch.workers.data import ByteCorpus, check_encoding, load_corpus
from anabranch.workers.shards import TokenWindows, text_folder
from anabranch.workers.tasks.base import Recipe, TokenBatch, continued, generator_of
from anabranch.workers.tasks.options import read_options, require

VOCABULARY = 256
HELDOUT_WINDOWS = 128
HELDOUT_BATCH = 32
_INIT_STD = 0.02
_ROPE_BASE = 10_000.0


@dataclass(frozen=True)
class GPTConfig(Recipe):
    """The options of the task `gpt`, as in `[task.options]` of run.toml. Sizes of windows are in bytes."""

    context: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    lookback: int = 3  # embeddings summed per position: this byte and the ones before it
    batch: int = 6
    optimizer: str = "muon"
    learning_rate: float = 2.5e-3
    final_learning_rate: float = 2.5e-4
    warmup_tokens: int = 15_000
    total_tokens: int = 20_000_000
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.1
    data: str = ""  # a folder of text; empty: the Python standard library's sources
    encoding: str = ""  # of the folder's files, to make them UTF-8; empty: their bytes as they are

    def __post_init__(self) -> None:
        for name in ("context", "layers", "heads", "width", "lookback", "batch", "total_tokens"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        super().__post_init__()
        if self.encoding and (allowed := check_encoding(self.encoding)):
            require(False, "encoding", self.encoding, allowed)
        whole = 2 * self.heads
        require(self.width % whole == 0, "width", self.width, f"a multiple of 2 × heads = {whole}")
        require(self.lookback <= self.context, "lookback", self.lookback, f"at most context = {self.context}")


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
        self.config = read_options(GPTConfig, options or {}, "gpt")

    def build_model(self, device: torch.device | str = "cpu") -> GPT:
        """Built on the CPU and then moved, so that one torch seed gives the same values on every device."""
        return GPT(self.config).to(device)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW or Muon; norms' gains are not decayed."""
        return self.config.build_optimizer(model, fused=True)

    def batches(self, seed: int, worker: str) -> Iterator[TokenBatch]:
        """Random windows of the training text, drawn by a generator of (seed, worker)."""
        rng, corpus = generator_of(seed, worker), self._corpus()
        while True:
            yield TokenBatch.of(corpus.random_windows(rng, self.config.batch, self.config.context))

    @property
    def batch(self) -> int:
        return self.config.batch

    def dataset(self) -> TokenWindows:
        """The training text in windows of `context` bytes."""
        return text_folder(self._folder(), self.config.context, self.config.encoding)

    def loss(self, model: nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Mean cross entropy in nats per byte."""
        logits: torch.Tensor = model(batch.inputs)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def heldout_batches(self) -> list[TokenBatch]:
        """128 windows spread evenly over the held-out files."""
        windows = self._corpus().heldout_windows(HELDOUT_WINDOWS, self.config.context)
        return [TokenBatch.of(windows[at : at + HELDOUT_BATCH]) for at in range(0, HELDOUT_WINDOWS, HELDOUT_BATCH)]

    def learning_rate(self, global_tokens: int) -> float:
        """Warm-up and cosine over the run's merged tokens."""
        return self.config.rate(global_tokens)

    def sample(self, model: nn.Module, prompt: str, length: int, temperature: float, seed: int) -> str:
        """`length` bytes that the model continues `prompt` with, as text; what is no UTF-8 is replaced."""
        return generate(model, self.config, prompt.encode(), length, temperature, seed).decode(errors="replace")

    def _corpus(self) -> ByteCorpus:
        return load_corpus(self._folder(), encoding=self.config.encoding)

    def _folder(self) -> Path | None:
        return Path(self.config.data) if self.config.data else None


@torch.inference_mode()
def generate(
    model: nn.Module, config: GPTConfig, prompt: bytes, max_new_bytes: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """`max_new_bytes` bytes that the model continues `prompt` with (the prompt itself is not returned).

    See `base.continued`. An empty prompt starts from a newline, as if at the start of a file.
    """
    device = next(model.parameters()).device

    def logits(text: list[int]) -> torch.Tensor:
        last: torch.Tensor = model(torch.tensor([text[-config.context :]], device=device))[0, -1]  # [256]
        return last

    return bytes(continued(logits, list(prompt or b"\n"), max_new_bytes, temperature, seed))
