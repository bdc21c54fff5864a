"""The task `hf`: fine-tune a causal language model of a local Hugging Face folder, whole or with LoRA adapters.

The folder is what `save_pretrained` of a model and its tokenizer wrote; nothing is downloaded. Every member needs the
same one. What it holds decides the run only where it is not trained: with LoRA the frozen weights, and always the
tokenizer. `task.options.checksum` lets members with another folder be refused (see `checksum_of`).

Needs the extra `hf` (transformers; peft for LoRA), which is imported only when something is built.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from anabranch.errors import SpecError, UsageError
from anabranch.workers.data import check_encoding, windows
from anabranch.workers.shards import TokenWindows
from anabranch.workers.tasks.base import Recipe, TokenBatch, continued, generator_of
from anabranch.workers.tasks.options import read_options, require
from anabranch.workers.tokens import TokenCorpus, load_tokens

log = logging.getLogger("anabranch.worker")

_LOADING = threading.Lock()  # transformers patches its classes meanwhile: what two threads put back stays patched

HELDOUT_WINDOWS = 64
_DTYPES = ("float32", "bfloat16")
_HASHED = (
    "*.safetensors", "*.bin", "config.json", "tokenizer*", "vocab*", "merges.txt", "spiece.model", "*.tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class HFConfig(Recipe):
    """The options of the task `hf`, as in `[task.options]` of run.toml. Lengths are in tokens of the tokenizer."""

    model: str = ""  # folder of model and tokenizer; every member may have its own place for it: --model
    data: str = ""  # folder of text, --data; empty: the Python standard library's sources
    encoding: str = "utf-8"  # of the folder's files
    checksum: str = ""  # of the model's folder; members with another one are refused. Empty: not compared
    context: int = 128  # inputs per window
    batch: int = 4  # windows per step
    optimizer: str = "adamw"  # or muon
    learning_rate: float = 5e-5
    final_learning_rate: float = 5e-6
    warmup_tokens: int = 10_000
    total_tokens: int = 10_000_000
    beta1: float = 0.9
    beta2: float = 0.98
    weight_decay: float = 0.01
    dtype: str = "float32"  # of forward and backward passes, and of frozen weights; what is trained is float32
    max_mb: int = 256  # 10⁶ bytes of text that are read at most
    lora: bool = False
    lora_r: int = 8
    lora_alpha: int = 16
    lora_dropout: float = 0.0
    lora_targets: str = "all-linear"  # or names of modules, with commas between them

    def __post_init__(self) -> None:
        for name in ("context", "batch", "total_tokens", "max_mb", "lora_r", "lora_alpha"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        super().__post_init__()
        require(0 <= self.lora_dropout < 1, "lora_dropout", self.lora_dropout, "at least 0, below 1")
        if allowed := check_encoding(self.encoding):
            require(False, "encoding", self.encoding, allowed)
        require(self.dtype in _DTYPES, "dtype", self.dtype, f"one of {', '.join(_DTYPES)}")
        require(bool(self.targets), "lora_targets", self.lora_targets, "all-linear, or names of modules")

    @property
    def targets(self) -> str | list[str]:
        """As PEFT takes them."""
        if self.lora_targets == "all-linear":
            return self.lora_targets
        return [name.strip() for name in self.lora_targets.split(",") if name.strip()]


class HFTask:
    """A `base.SharedTask`. Text is packed: windows run over the ends of files, where the end token is."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Reads no file but checks that the model's folder is there; `SpecError` names what is wrong."""
        self.config = read_options(HFConfig, options or {}, "hf")
        folder = Path(self.config.model)
        if not self.config.model or not (folder / "config.json").is_file():
            raise SpecError(
                f"task.options.model = {self.config.model!r}: no folder with a config.json on this machine; "
                "name one with --model"
            )
        self._folder = folder

    # --- the model ----------------------------------------------------------------------------------------

    def build_model(self, device: torch.device | str = "cpu") -> nn.Module:
        """The folder's model, with fresh adapters if `lora` is set; what is trained is float32.

        Raises `SpecError` if the folder is another one than the run's, or no causal language model.
        """
        found = checksum_of(self._folder)
        log.info("model folder: checksum %s (set task.options.checksum to refuse any other)", found)
        require(self.config.checksum in ("", found), "checksum", self.config.checksum, f"this folder's, {found}")
        transformers = _needed("transformers")
        dtype = getattr(torch, self.config.dtype) if self.config.lora else torch.float32
        try:
            with _LOADING:
                model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                    self._folder, dtype=dtype, local_files_only=True
                )
        except (OSError, ValueError) as error:
            raise SpecError(f"task.options.model = {self.config.model!r} cannot be loaded: {error}") from error
        limit = getattr(model.config, "max_position_embeddings", None)
        require(
            limit is None or self.config.context <= limit,
            "context", self.config.context, f"at most the model's max_position_embeddings = {limit}",
        )  # fmt: skip
        model.config.use_cache = False  # of past keys and values: not for training
        return (self._with_adapters(model) if self.config.lora else model).to(device)

    def _with_adapters(self, model: Any) -> nn.Module:
        peft = _needed("peft")
        transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's own linear layer
        settings = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.config.lora_r,
            lora_alpha=self.config.lora_alpha,
            lora_dropout=self.config.lora_dropout,
            target_modules=self.config.targets,
            fan_in_fan_out=transposed,
        )
        try:
            adapted: nn.Module = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise SpecError(f"task.options.lora_targets = {self.config.lora_targets!r}: {error}") from error
        return adapted

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW or Muon over what is trained; biases and norms' gains are not decayed."""
        return self.config.build_optimizer(model)

    def loss(self, model: nn.Module, batch: TokenBatch) -> torch.Tensor:
        """Mean cross entropy in nats per token."""
        with self._autocast(batch.inputs.device.type):
            logits: torch.Tensor = model(input_ids=batch.inputs).logits  # [B, T, vocabulary]
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())

    def _autocast(self, device: str) -> AbstractContextManager[Any]:
        if self.config.dtype == "float32":
            return nullcontext()
        return torch.autocast(device, getattr(torch, self.config.dtype))

    def learning_rate(self, global_tokens: int) -> float:
        """Warm-up and cosine over the run's merged tokens."""
        return self.config.rate(global_tokens)

    # --- the data -----------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Windows per step."""
        return self.config.batch

    def dataset(self) -> TokenWindows:
        """The training tokens in windows of `context`."""
        return TokenWindows(self._tokens.train, self.config.context, self._tokens.fingerprint)

    def batches(self, seed: int, worker: str) -> Iterator[TokenBatch]:
        """Random windows of the training tokens, drawn by a generator of (seed, worker)."""
        rng = generator_of(seed, worker)
        while True:
            starts = rng.integers(0, self._last_start(self._tokens.train) + 1, size=self.config.batch)
            yield TokenBatch.of(windows(self._tokens.train, starts, self.config.context))

    def heldout_batches(self) -> list[TokenBatch]:
        """64 windows, or as many as there are, spread evenly over the held-out tokens."""
        heldout = self._tokens.heldout
        last = self._last_start(heldout)
        starts = np.unique(np.linspace(0, last, num=HELDOUT_WINDOWS).astype(np.int64))
        size, length = self.config.batch, self.config.context
        parts = (starts[at : at + size] for at in range(0, starts.size, size))
        return [TokenBatch.of(windows(heldout, part, length)) for part in parts]

    def _last_start(self, tokens: Any) -> int:
        last = int(tokens.size) - self.config.context - 1
        if last < 0:
            raise UsageError(
                f"task.options.data has only {tokens.size} tokens in its smaller part (training or held-out), a "
                f"window takes {self.config.context + 1}: add text or choose a smaller task.options.context"
            )
        return last

    @cached_property
    def _tokens(self) -> TokenCorpus:
        folder = Path(self.config.data) if self.config.data else None
        return load_tokens(folder, self.tokenizer, self.config.max_mb * 1_000_000, self.config.encoding)

    @cached_property
    def tokenizer(self) -> Any:
        """Of the model's folder."""
        try:
            return _needed("transformers").AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise SpecError(
                f"task.options.model = {self.config.model!r} has no tokenizer that can be loaded: {error}"
            ) from error

    # --- use ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def sample(self, model: nn.Module, prompt: str, length: int, temperature: float, seed: int) -> str:
        """`length` new tokens that the model continues `prompt` with, as text without the prompt."""
        device = next(model.parameters()).device
        tokens: list[int] = self.tokenizer(prompt)["input_ids"] or [self.tokenizer.eos_token_id or 0]

        def logits(tokens: list[int]) -> torch.Tensor:
            window = torch.tensor([tokens[-self.config.context :]], device=device)  # [1, T]
            last: torch.Tensor = model(input_ids=window).logits[0, -1]  # [vocabulary]
            return last

        text: str = self.tokenizer.decode(continued(logits, tokens, length, temperature, seed))
        return text


def checksum_of(folder: Path) -> str:
    """Of names and bytes of a model folder's weights, config and tokenizer: 16 hexadecimal digits.

    The same weights in other shards give another one: copy the folder, do not save it anew.
    """
    digest = hashlib.sha256()
    for path in sorted({path for pattern in _HASHED for path in folder.glob(pattern) if path.is_file()}):
        with path.open("rb") as file:
            digest.update(f"{path.name}:{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def _needed(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(f"the task hf needs {module}: pip install 'anabranch[hf]' ({error})") from error
