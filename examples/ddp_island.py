"""Several processes that train as one worker: DistributedDataParallel under torchrun.

    torchrun --nproc-per-node 2 examples/ddp_island.py URL

The loop is that of nanogpt_loop.py. Every rank calls `join`, `batches` and `step`; rank 0 talks to the run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from nanogpt_loop import NanoGPT, loss_of, read_text, windows
from torch.nn.parallel import DistributedDataParallel

import anabranch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="redis://…?run=NAME, as `anabranch up` prints it")
    parser.add_argument("--name", help="of the worker that all ranks are")
    parser.add_argument("--steps", type=int, default=0, help="leave after so many; 0: when the run stops")
    parser.add_argument("--save", type=Path, help="folder for every rank's parameters at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    torch.manual_seed(rank)  # DDP and the run see to equal parameters
    model = DistributedDataParallel(NanoGPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with anabranch.join(arguments.url, model, optimizer, name=arguments.name) as session:
        steps = 0
        for batch in session.batches(windows(read_text(None), seed=rank)):
            loss = loss_of(model, batch.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step(tokens=batch[:, 1:].numel(), loss=loss.detach())  # of this rank
            steps += 1
            if steps == arguments.steps:
                break
        if arguments.save is not None:
            torch.save(model.module.state_dict(), arguments.save / f"rank{rank}.pt")
        print(f"rank {rank}: {steps} steps as {session.name}, {session.tokens:,} tokens merged; {session.stopped}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
