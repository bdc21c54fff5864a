"""Several processes that act as one worker: the ranks of one torch.distributed group.

`anabranch.join` makes an `Island` when torch.distributed is initialised with more than one process (torchrun). Rank 0
owns the only connection to the run. Every rank calls the same methods in the same order, as with any collective::

    torch.distributed.init_process_group()
    model = DistributedDataParallel(Model())         # equal gradients on all ranks
    with anabranch.join(url, model) as session:      # rank 0 adopts the global model, and passes it on
        for batch in session.batches(loader):        # each rank its own; ends on all ranks together
            ...
            session.step(tokens=batch.numel(), loss=loss)  # tokens are summed, losses averaged over ranks

A step costs two messages of a few hundred bytes between the ranks (over gloo, also where gradients go over NCCL), and
whatever was adopted travels from rank 0 to the others, so that all ranks hold the same bits.

What goes wrong on rank 0 is raised on all ranks. A rank that dies takes the island with it: the others' next call
raises `IslandBroken`, rank 0 leaves the run without a last contribution, and what was not merged is lost. Start the
island again; it joins like any other worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, SupportsInt, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from anabranch import errors
from anabranch.errors import AnabranchError, IslandBroken, PayloadError, UsageError
from anabranch.queue.url import RunUrl
from anabranch.shuffle import Indices
from anabranch.spec import MergeSpec
from anabranch.workers.checked import STEP_TOKENS, one_value, whole
from anabranch.workers.copies import Adopter, OnAdopt, adopter_for
from anabranch.workers.member.client import LEAVE_S
from anabranch.workers.optimizer_state import load_state
from anabranch.workers.session import REWARM_STEPS, Companion, Session
from anabranch.workers.shards import Shards
from anabranch.workers.tensors import Buffer, buffers_of, shapes, trainable

T = TypeVar("T")

# Rank 0 may wait long: for a run to begin, for data, for the rest of a duty cycle. A rank that dies is noticed by its
# closed connection, one that hangs by the timeout of the model's own collectives.
PATIENCE = timedelta(days=1)
_ANY_BUFFER = MergeSpec(buffers=("*",))
_FLAGS = 5  # error, stopped, paused, global tokens, whether the next step should tell its loss; then the fragments


class _Others(Companion):
    """The other ranks, as rank 0 knows them: what they still have to be told, also while a duty cycle rests."""

    def __init__(self) -> None:
        self._adopted: set[int] = set()
        self._begun = False
        self._state: memoryview | None = None

    def adopted(self, fragments: list[int]) -> None:
        self._adopted.update(fragments)

    def may_take_over(self) -> bool:
        return not self._begun  # or ranks would go different ways

    def took_over(self, state: memoryview) -> None:
        self._state = state

    def begin(self) -> bytes | None:
        """Once rank 0 has joined: the optimizer state it took over, for them, too."""
        state, self._state, self._begun = self._state, None, True
        return bytes(state) if state is not None else None

    def take_adopted(self) -> list[int]:
        """Fragments that were adopted since this was last asked."""
        adopted = sorted(self._adopted)
        self._adopted.clear()
        return adopted


@dataclass(frozen=True)
class _Introduction:
    """What every rank has to know once rank 0 has joined."""

    name: str
    fragments: list[list[str]]  # names of the tensors in each
    cold: bool
    peer_state: bytes | None  # taken over for a warm start


class _Numbers:
    """A shared dataset of which only the numbers are wanted: (indices, epoch)."""

    def __init__(self, shards: Shards[Any]) -> None:
        self._shards = shards
        self.fingerprint = shards.fingerprint

    def __len__(self) -> int:
        return len(self._shards)

    def batch(self, indices: Indices, epoch: int) -> tuple[Indices, int]:
        return indices, epoch


def share_of(indices: Indices, rank: int, ranks: int) -> Indices:
    """One rank's part of a batch: each item once, or, where there are fewer than ranks, one item for each rank."""
    return np.resize(indices, max(indices.size, ranks))[rank::ranks]


class Island:
    """One worker on all ranks of `group` (by default of the whole world). Every public method is a collective call
    unless it says otherwise; figures such as `tokens` are those of the last `step`, equal on all ranks."""

    stopped: str | None = None
    paused: bool = False
    tokens: int = 0  # that the whole run has merged so far

    def __init__(
        self,
        url: str | RunUrl | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        on_adopt: OnAdopt | None = None,
        **options: Any,
    ) -> None:
        """Prepare; `start` joins. `options` are those of `Session`; `on_adopt` is called on every rank."""
        self.optimizer = optimizer
        self._model = model
        self._on_adopt = on_adopt
        self._adopter = Adopter()  # on rank 0 the session has one
        self._group = group if group is not None else dist.group.WORLD
        ranks = dist.get_process_group_ranks(self._group)
        self._rank, self._size, self._first = dist.get_rank(self._group), len(ranks), ranks[0]
        self._control = dist.new_group(ranks, timeout=PATIENCE, backend="gloo", use_local_synchronization=True)
        self._leader: Session | None = None  # rank 0 has one
        self._others = _Others()
        self._make_leader = partial(
            Session, url, model, optimizer, companion=self._others, on_adopt=on_adopt, **options
        )
        self._introduced: _Introduction | None = None
        self._tell_loss = True
        self._steps = 0

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Rank 0 joins and adopts; then all ranks hold the global model. Raises on all ranks what `Session.start`
        raises, and `IslandBroken` if the ranks' models differ."""
        self._compare_models()
        self._find_copies()
        introduction = self._from_rank_0(self._lead)
        self._introduced = replace(introduction, peer_state=None)  # it may be large
        self._take_over(introduction.peer_state)
        parameters, buffers = dict(trainable(self._model)), buffers_of(self._model, _ANY_BUFFER)
        fragments = introduction.fragments
        self._parts = [[(name, parameters[name]) for name in names if name in parameters] for names in fragments]
        self._buffers = [[buffers[name] for name in names if name not in parameters] for names in fragments]
        self._share()
        for fragment in range(len(fragments)):
            self._spread(fragment)
        return self

    def close(self, reason: str = "done", *, drain_s: float = LEAVE_S, contribute: bool = True) -> None:
        """Rank 0 leaves the run as `Session.close` does; the others have nothing to close. Not a collective call, so
        that an error on one rank can close what it has."""
        if self._leader is not None:
            self._leader.close(reason, drain_s=drain_s, contribute=contribute)

    def abandon(self, reason: str, drain_s: float) -> bool:
        """See `Session.abandon`; False on other ranks than 0."""
        return self._leader is not None and self._leader.abandon(reason, drain_s)

    def hurry(self) -> None:
        """See `Session.hurry`."""
        if self._leader is not None:
            self._leader.hurry()

    def __enter__(self) -> Self:
        return self if self._introduced is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._leader is not None:
            self._leader.__exit__(kind, error, trace)

    # --- training -----------------------------------------------------------------------------------------

    def batches(self, source: Shards[T] | Iterable[T], batch: int = 1) -> Iterator[T]:
        """What this rank trains on. Ends on all ranks together: when the run stops, or when one rank's own data ends.
        An error that one rank's own data raises is raised there, and as `IslandBroken` on the others.

        Of a shared dataset (`Shards`) each rank gets other items, `batch` of them; where a range ends there are
        fewer, and if fewer than there are ranks, some are given twice.
        """
        return self._until_the_end(source, whole("batch", batch))

    def _until_the_end(self, source: Shards[T] | Iterable[T], batch: int) -> Iterator[T]:
        if isinstance(source, Iterable) and not hasattr(source, "fingerprint"):
            yield from self._own(source)
        else:
            yield from self._shared_out(cast("Shards[T]", source), batch)
        self._share()  # why it ended

    def _own(self, source: Iterable[T]) -> Iterator[T]:
        items = iter(source)
        nothing = object()
        while True:
            error: Exception | None = None
            try:
                item = next(items, nothing)
            except Exception as raised:  # the others would wait for this rank
                item, error = nothing, raised
            ends = item is nothing or (self._leader is not None and self._leader.stopped is not None)
            ended, failed = self._sum([float(ends), float(error is not None)])
            if error is not None:
                raise error
            if failed > 0:
                raise IslandBroken("the data of another rank of this island ended in an error: see its log")
            if ended > 0:
                return
            yield cast("T", item)

    def _shared_out(self, shards: Shards[T], batch: int) -> Iterator[T]:
        taken = self._leader.batches(_Numbers(shards), batch * self._size) if self._leader is not None else None

        def take() -> tuple[Indices, int, list[int]] | None:
            """Numbers and epoch, and which fragments rank 0 adopted while it waited for them."""
            items = next(taken, None) if taken is not None else None
            return (*items, self._others.take_adopted()) if items is not None else None

        while (told := self._from_rank_0(take)) is not None:
            indices, epoch, adopted = told
            for fragment in adopted:
                self._spread(fragment)
            mine = share_of(indices, self._rank, self._size)
            yield shards.batch(mine, epoch)

    def step(self, tokens: SupportsInt, loss: torch.Tensor | float | None = None) -> None:
        """Call on all ranks after `optimizer.step()`. `tokens`: of this rank; the island's step counts their sum.

        `loss`: this rank's mean; the island's is weighted by tokens. Both are what `Session.step` takes; else
        `UsageError` on this rank, `IslandBroken` on the others. Raises on all ranks what rank 0's session raises, and
        `IslandBroken` if a rank is gone.
        """
        refused: UsageError | None = None
        try:
            count, loss = whole("tokens", tokens, most=STEP_TOKENS), one_value("loss", loss)
        except UsageError as raised:  # the others would wait for this rank
            refused, count, loss = raised, 0, None
        told = self._tell_loss and loss is not None
        mean = 0.0
        if told and loss is not None:
            mean = float(loss if isinstance(loss, (int, float)) else loss.detach())
        everybody, known, total, wrong = self._sum(
            [count, count * told, mean * count * told, float(refused is not None)]
        )
        if refused is not None:
            raise refused
        if wrong > 0:
            raise IslandBroken("another rank of this island was given a step that cannot be counted: see its log")
        self._steps += 1
        error: Exception | None = None
        if self._leader is not None:
            try:
                self._leader.step(int(everybody), total / known if known else None)
            except Exception as raised:
                error = raised
        for fragment in self._share(error):
            self._spread(fragment)

    @property
    def name(self) -> str:
        return self._introduction().name

    @property
    def warmth(self) -> float:
        return min(1.0, (self._steps + 1) / REWARM_STEPS) if self._introduction().cold else 1.0

    def versions(self) -> list[int]:
        """Adopted version of each fragment; on rank 0 only."""
        if self._leader is None:
            raise UsageError("only rank 0 of an island knows the fragments' versions")
        return self._leader.versions()

    # --- between the ranks --------------------------------------------------------------------------------

    def _compare_models(self) -> None:
        """An island of different models would hang, or mix up tensors."""
        mine: list[tuple[str, tuple[int, ...]]] = [(name, tuple(shape)) for name, shape in shapes(self._model)]
        mine += [(name, tuple(buffer.shape)) for name, buffer in buffers_of(self._model, _ANY_BUFFER).items()]
        rank_0 = self._tell(mine)
        if self._sum([float(mine != rank_0)])[0] > 0:
            odd = next((f"{m} here, {r} on rank 0" for m, r in zip(mine, rank_0, strict=False) if m != r), "")
            raise IslandBroken(
                "the ranks of this island have different models: "
                + (odd or f"{len(mine)} tensors here, {len(rank_0)} on rank 0")
            )

    def _find_copies(self) -> None:
        """Each rank for itself (rank 0 for its error: the session has its own), so that all of them can be told."""
        error: UsageError | None = None
        try:
            self._adopter = adopter_for(dict(trainable(self._model)), self.optimizer, self._on_adopt)
        except UsageError as raised:
            error = raised
        if self._sum([float(error is not None)])[0] > 0:
            raise error or IslandBroken("another rank of this island has an optimizer that cannot take part")

    def _lead(self) -> _Introduction:
        """Rank 0 joins."""
        self._leader = leader = self._make_leader()
        leader.start()
        assert leader.layout is not None
        names = [[tensor.name for tensor in fragment.tensors] for fragment in leader.layout.fragments]
        return _Introduction(leader.name, names, leader.cold, self._others.begin())

    def _take_over(self, state: bytes | None) -> None:
        """The peer's optimizer state that rank 0 has, on the others, too."""
        if state is None:
            return
        error: PayloadError | None = None
        if self._leader is None:
            try:
                load_state(self._model, self.optimizer, memoryview(state), self._adopter.copies.keys)
            except PayloadError as raised:
                error = raised
        if self._sum([float(error is not None)])[0] > 0:
            raise IslandBroken(
                f"a rank could not take over the optimizer state that rank 0 has ({error or 'see its log'}): give "
                "every rank of this island the same optimizer, or join without a warm start"
            )

    def _introduction(self) -> _Introduction:
        if self._introduced is None:
            raise errors.MemberRefused("the island has not joined; use anabranch.join or `with Island(...)`")
        return self._introduced

    def _share(self, error: Exception | None = None) -> list[int]:
        """Rank 0's view becomes everybody's. Returns the fragments it adopted since; raises `error` on all ranks."""
        flags = torch.zeros(_FLAGS + len(self._parts), dtype=torch.int64)
        leader = self._leader
        if leader is not None:
            view = [error is not None, leader.stopped is not None, leader.paused, leader.tokens, leader.wants_loss]
            flags[:_FLAGS] = torch.tensor([int(value) for value in view])
            flags[[_FLAGS + fragment for fragment in self._others.take_adopted()]] = 1
        self._together(lambda: dist.broadcast(flags, self._first, group=self._control))
        failed, stopped, paused, self.tokens, tell_loss = flags[:_FLAGS].tolist()
        self.paused, self._tell_loss = bool(paused), bool(tell_loss)
        if failed:
            told = self._tell(_wire(error) if error is not None else None)
            raise error if error is not None else _from_wire(told)
        if stopped and self.stopped is None:
            self.stopped = self._tell(leader.stopped if leader is not None else None)
        return [int(fragment) for fragment in flags[_FLAGS:].nonzero().flatten()]

    @torch.no_grad()
    def _spread(self, fragment: int) -> None:
        """Rank 0's values of a fragment, to all ranks: one message for each dtype, and one for buffers."""
        self._spread_buffers(self._buffers[fragment])
        parts = self._parts[fragment]
        values: list[tuple[str, torch.nn.Parameter, torch.Tensor]] = []
        for dtype in dict.fromkeys(parameter.dtype for _, parameter in parts):
            alike = [(name, parameter) for name, parameter in parts if parameter.dtype == dtype]
            flat = torch.cat([parameter.detach().reshape(-1) for _, parameter in alike])
            self._together(partial(dist.broadcast, flat, self._first, group=self._group))
            pieces = torch.split(flat, [parameter.numel() for _, parameter in alike])
            values += [(*part, piece) for part, piece in zip(alike, pieces, strict=True)]
        if self._leader is None:
            self._adopter.put(values)

    def _spread_buffers(self, buffers: list[Buffer]) -> None:
        if not buffers:
            return
        where = next(self._model.parameters()).device
        parts = [buffer.value for buffer in buffers]
        flat = torch.cat(
            [
                torch.full((buffer.shape.numel(),), math.nan, device=where)  # something else is there by now
                if part is None
                else part.detach().reshape(-1).to(where, torch.float32)
                for buffer, part in zip(buffers, parts, strict=True)
            ]
        )
        self._together(partial(dist.broadcast, flat, self._first, group=self._group))
        pieces = torch.split(flat, [buffer.shape.numel() for buffer in buffers])
        for buffer, piece in zip(buffers, pieces, strict=True):
            if self._leader is None and not piece.isnan().any():
                buffer.put(piece)

    def _sum(self, values: list[float]) -> list[float]:
        total = torch.tensor(values, dtype=torch.float64)  # whole up to 2⁵³
        self._together(lambda: dist.all_reduce(total, group=self._control))
        result: list[float] = total.tolist()
        return result

    def _tell(self, value: Any) -> Any:
        """Rank 0's `value`, on all ranks."""
        box = [value if self._rank == 0 else None]
        self._together(lambda: dist.broadcast_object_list(box, self._first, group=self._control))
        return box[0]

    def _from_rank_0(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, on all ranks; what it raises there, they all raise."""
        told: Any = None
        error: Exception | None = None
        if self._rank == 0:
            try:
                told = work()
            except Exception as raised:
                error = raised
        told = self._tell(told if error is None else _wire(error))
        if error is not None:
            raise error
        if isinstance(told, _WireError):
            raise _from_wire(told)
        return cast("T", told)

    def _together(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise IslandBroken(
                f"another rank of this island is gone, so this one ends, too ({error}); start the island again"
            ) from error


@dataclass(frozen=True)
class _WireError:
    kind: str
    text: str


def _wire(error: Exception) -> _WireError:
    """An exception itself may not survive pickling."""
    return _WireError(type(error).__name__, str(error))


def _from_wire(told: _WireError) -> Exception:
    kind = getattr(errors, told.kind, None)
    if isinstance(kind, type) and issubclass(kind, AnabranchError):
        return kind(told.text)
    return AnabranchError(f"rank 0 of this island: {told.kind}: {told.text}")
