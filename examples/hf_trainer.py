"""Hugging Face Trainer as a worker: one callback. Works offline, with a tiny model that is made on the spot.

    python examples/hf_trainer.py URL --model runs/tiny --text FOLDER           # all parameters
    python examples/hf_trainer.py URL --model runs/tiny --text FOLDER --lora    # PEFT adapters only
    torchrun --nproc-per-node 2 examples/hf_trainer.py URL --model runs/tiny    # two processes, one worker

Every worker of a run needs the same model folder: make it once and copy it.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from anabranch.workers.integrations.huggingface import AnabranchCallback

CONTEXT = 32


def text_of(folder: Path | None) -> str:
    root = folder or Path(sysconfig.get_path("stdlib")) / "json"
    files = sorted(path for path in root.rglob("*") if path.suffix in {".py", ".txt", ".md"})
    return "\n".join(path.read_text(errors="replace") for path in files)


def make_tiny_model(folder: Path, text: str, seed: int = 0) -> None:
    """A randomly initialised Llama of some ten thousand parameters, and a byte-level tokenizer trained on `text`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def blocks(tokenizer: Any, text: str) -> list[dict[str, list[int]]]:
    """The text in pieces of CONTEXT tokens: a dataset, as the Trainer takes one."""
    tokens: list[int] = tokenizer(text, verbose=False)["input_ids"]
    starts = range(0, len(tokens) - CONTEXT, CONTEXT)
    pieces = [tokens[start : start + CONTEXT] for start in starts]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def with_adapters(model: Any, seed: int = 0) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="redis://…?run=NAME, as `anabranch up` prints it")
    parser.add_argument("--model", type=Path, default=Path("runs/tiny"), help="folder; made if it is not there")
    parser.add_argument("--text", type=Path, help="folder of text; by default some of Python's own sources")
    parser.add_argument("--lora", action="store_true", help="train PEFT adapters only")
    parser.add_argument("--name", help="of this worker")
    parser.add_argument("--steps", type=int, default=1_000_000, help="leave after so many, if the run goes on")
    arguments = parser.parse_args()

    text = text_of(arguments.text)
    if not (arguments.model / "config.json").exists():
        make_tiny_model(arguments.model, text)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    if arguments.lora:
        model = with_adapters(model)
    settings = TrainingArguments(
        output_dir=str(arguments.model / "trainer"),
        max_steps=arguments.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    with AnabranchCallback(arguments.url, name=arguments.name) as callback:  # the one line, and who leaves on errors
        trainer = Trainer(model=model, args=settings, train_dataset=blocks(tokenizer, text), callbacks=[callback])
        trainer.train()


if __name__ == "__main__":
    main()
