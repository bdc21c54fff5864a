"""Joining a run from a training loop of one's own."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from anabranch.queue.url import RunUrl
from anabranch.workers.copies import OnAdopt
from anabranch.workers.island import Island
from anabranch.workers.session import Session as Session
from anabranch.workers.trains import Trains


def join(
    url: str | RunUrl | None,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    name: str | None = None,
    label: str = "",
    duty: float = 1.0,
    offload_base: bool = False,
    warm_start: bool = False,
    timeout_s: float = math.inf,
    on_adopt: OnAdopt | None = None,
) -> Trains:
    """Join a run with a model of your own and adopt the global parameters.

    Parameters with `requires_grad` are synchronized, as float32, and buffers that training changes; frozen parameters
    stay as they are here. Blocks until the global model is adopted. Raises `LayoutMismatch` (names the first tensor
    that differs), `MemberRefused`, `UsageError` (a bad name, URL or number, a sharded model) or `ServerError`.

    `duty`: share of the time spent training, above 0 and at most 1. `offload_base`: keep 4 bytes per parameter on the
    host, not the device.
    `warm_start`: if the run is under way, take over the optimizer state of a peer (of the same kind of optimizer)
    instead of warming up; waits at most 20 s for it.

    `url` None: what the environment variable ANABRANCH_URL says. `timeout_s`: how long to wait for the run, for a
    place in it and for its model, before `MemberRefused` says which of them did not come; meanwhile the log does.
    Copies of the parameters that the optimizer keeps (`z` of schedule-free ones, float32 masters) are found by trying
    out an optimizer of its kind, and follow what is adopted; one whose copies cannot be found is refused
    (`UsageError`). With `on_adopt` nothing is tried out: it is called, in the thread that trains, with what was added
    to each parameter (by name; float32, of the parameter's shape), and writes that to wherever it belongs.

    Where torch.distributed is initialised with several processes (torchrun), these are one worker: every rank calls
    this, and then the session's methods, together. See `anabranch.workers.island`.
    """
    device = next((str(parameter.device) for parameter in model.parameters()), "")
    if dist.is_available() and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        device = f"{ranks} × {device}"
        kind: type[Session | Island] = Island
    else:
        kind = Session
    return kind(
        url,
        model,
        optimizer,
        name=name,
        label=label,
        device=device,
        duty=duty,
        offload_base=offload_base,
        warm_start=warm_start,
        timeout_s=timeout_s,
        on_adopt=on_adopt,
    ).start()
