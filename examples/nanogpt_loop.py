"""A plain PyTorch training loop, and the five lines that make it a worker of a run (marked with numbers).

python examples/nanogpt_loop.py URL                 # trains on Python's own sources
python examples/nanogpt_loop.py URL --text FOLDER   # or on your text
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import anabranch  # 1

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # 3 × [B, heads, T, W/h]
        mixed = functional.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    """Bytes in, logits of the next byte out: int64 [B, T] -> float [B, T, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.wte(inputs) + self.wpe.weight[: inputs.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read_text(folder: Path | None, heldout: bool = False) -> Tensor:
    """The folder's Python and text files as bytes, uint8 [n]; every twentieth is held out."""
    root = folder or Path(sysconfig.get_path("stdlib")) / "asyncio"
    files = sorted(path for path in root.rglob("*") if path.suffix in {".py", ".txt", ".md"})
    chosen = [path for at, path in enumerate(files) if (at % 20 == 0) == heldout]
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in chosen)), dtype=torch.uint8)


def windows(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless random windows, int64 [B, T + 1]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)].long()


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean nats per byte."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="redis://…?run=NAME, as `anabranch up` prints it")
    parser.add_argument("--text", type=Path, help="folder of text; by default some of Python's own sources")
    parser.add_argument("--seed", type=int, default=0, help="of the data's order: another one for every worker")
    parser.add_argument("--steps", type=int, default=0, help="leave after so many; 0: when the run stops")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = NanoGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with anabranch.join(arguments.url, model, optimizer) as session:  # 2: adopts the global model, 5: leaves
        losses = []
        for batch in session.batches(windows(read_text(arguments.text), arguments.seed)):  # 3: until the run stops
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(tokens=batch[:, 1:].numel(), loss=loss.detach())  # 4: gives and takes; never waits
            losses.append(loss.item())
            if len(losses) == arguments.steps:
                break
    print(f"{len(losses)} steps, loss {losses[0]:.2f} -> {losses[-1]:.2f} nats/byte; {session.stopped or 'left'}")


if __name__ == "__main__":
    main()
