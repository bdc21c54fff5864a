"""Second copies of the parameters, as some optimizers keep them: what is adopted has to reach these, too.

Schedule-free AdamW steps from a point `z` of its own, mixed-precision optimizers from float32 masters: a value that
was only put into the parameter is undone by their next steps. So whatever adoption adds to a parameter is added to
its copies, which leaves the optimizer where it was relative to the parameter.

Which tensors are copies is tried out when a session joins, on stand-ins of a few elements: one optimizer of the same
kind begins at w, one at w + 1, both step with gradients of zero. What then differs by 1 between the two is a place,
what does not (averages of gradients) is none. A third one adopts in between; if that does not last as long as it does
for the one that began there, there is a copy that we did not find. Optimizers of torch itself are known.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from anabranch.errors import UsageError

log = logging.getLogger("anabranch.worker")

OnAdopt = Callable[[dict[str, torch.Tensor]], object]
"""By parameter name what was added to it, float32 and of its shape; the parameter has it already."""

_STEPS = 30  # without gradients, in which a copy would show
_WARM_UP = 2  # of them before the adoption: state is made by then
_FADED = 0.1  # share of what was adopted that may be missing after them: rounding of half precision
_STAND_IN = 4  # elements of a stand-in, at most, in each dimension
_SMALL = 1 << 24  # elements: up to so many an optimizer that cannot be made anew is copied as a whole
_OF_TORCH = {"ASGD": frozenset({"ax"})}
_KNOWN = ("torch.optim.", "anabranch.")  # modules whose optimizers keep no copies but those

_State = tuple[str, Any]  # where a tensor is: ("state", key), ("group", key) or ("attribute", name)


@dataclass
class Copies:
    """The copies in one optimizer: entries of each parameter's state, and tensors that are kept elsewhere."""

    optimizer: torch.optim.Optimizer | None = None
    keys: frozenset[str] = frozenset()  # in `optimizer.state[parameter]`
    fixed: dict[torch.nn.Parameter, list[torch.Tensor]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.keys or self.fixed)

    def of(self, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
        """Those of one parameter, as far as they are made yet."""
        yield from self.fixed.get(parameter, ())
        state = self.optimizer.state.get(parameter, {}) if self.optimizer is not None else {}
        for key in self.keys:
            if isinstance(kept := state.get(key), torch.Tensor) and kept.shape == parameter.shape:
                yield kept

    def move(self, parameter: torch.nn.Parameter, change: torch.Tensor) -> None:
        """Add to all copies what was added to the parameter. A copy that is not finite becomes the parameter."""
        for kept in self.of(parameter):
            moved = kept.detach().float() + change.to(kept.device)
            kept.detach().copy_(torch.where(torch.isfinite(moved), moved, parameter.detach().to(kept.device).float()))


class Adopter:
    """Puts values into parameters, and tells whoever has copies of them."""

    def __init__(self, copies: Copies | None = None, on_adopt: OnAdopt | None = None) -> None:
        self.copies = copies or Copies()
        self._on_adopt = on_adopt

    @torch.no_grad()
    def put(self, parts: Iterable[tuple[str, torch.nn.Parameter, torch.Tensor]]) -> None:
        """(name, parameter, value of any shape): each parameter gets its value."""
        changes: dict[str, torch.Tensor] = {}
        for name, parameter, value in parts:
            new = value.view(parameter.shape)
            if self.copies or self._on_adopt is not None:
                change = new.to(parameter.device).float() - parameter.detach().float()
                parameter.copy_(new)
                self.copies.move(parameter, change)
                changes[name] = change
            else:
                parameter.copy_(new)
        if self._on_adopt is not None:
            self._on_adopt(changes)


def adopter_for(
    parameters: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer | None, on_adopt: OnAdopt | None
) -> Adopter:
    """For the trained parameters, by name. `on_adopt`: the user writes adoption through himself, so nothing is tried
    out. Raises `UsageError` if the optimizer keeps copies that cannot be found."""
    if optimizer is None or on_adopt is not None:
        return Adopter(on_adopt=on_adopt)
    return Adopter(find_copies(list(parameters.values()), inner(optimizer)))


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`accelerate` wraps optimizers in one of its own."""
    wrapped = getattr(optimizer, "optimizer", None)
    return wrapped if isinstance(wrapped, torch.optim.Optimizer) else optimizer


def find_copies(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Copies:
    """What this optimizer keeps of these parameters; it and they stay as they are. `UsageError` if it keeps something
    that cannot be found."""
    kind = type(optimizer)
    masters = _masters(parameters, optimizer)
    if kind.__module__.startswith(_KNOWN):
        return Copies(optimizer, _OF_TORCH.get(kind.__name__, frozenset()), masters)
    try:
        with _undisturbed(parameters):
            roots, left = _try_out(parameters, optimizer)
    except Exception as error:  # whatever an optimizer does with stand-ins is no reason not to train
        log.warning(
            "%s could not be tried out (%s: %s): if it keeps a second copy of the parameters (masters, averages), "
            "what is adopted may be undone; join(on_adopt=…) is called to write it through",
            kind.__qualname__, type(error).__name__, error,
        )  # fmt: skip
        return Copies(optimizer, fixed=masters)
    if left is not None:
        raise UsageError(
            f"{kind.__qualname__} keeps a second copy of the parameters where it cannot be found: of what is adopted "
            f"{left:.0%} is left after {_STEPS - _WARM_UP} steps without gradients. Give anabranch.join "
            "`on_adopt`, a function that writes it through, or use another optimizer"
        )
    found = _collect(parameters, optimizer, roots)
    for parameter, kept in masters.items():
        found.fixed.setdefault(parameter, []).extend(kept)
    if found:
        log.info("%s keeps copies of the parameters: adopted values are written to them, too", kind.__qualname__)
    return found


# --- where copies are -----------------------------------------------------------------------------------------


def _masters(
    parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[torch.nn.Parameter, list[torch.Tensor]]:
    """Parameters that the optimizer does not have, by what it has in their place: tensors of the same values."""
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    ours = {id(p) for p in parameters}
    known = {id(p) for p in theirs}
    missing = [p for p in parameters if id(p) not in known]
    found = _matched(missing, [p for p in theirs if id(p) not in ours])
    if len(missing) == len(parameters) and not found:
        raise UsageError(
            f"{type(optimizer).__qualname__} has none of the model's parameters, nor copies of them: give "
            "anabranch.join the optimizer that trains this model, or none"
        )
    return found


def _matched(
    parameters: Iterable[torch.nn.Parameter], tensors: Iterable[torch.Tensor]
) -> dict[torch.nn.Parameter, list[torch.Tensor]]:
    """Each tensor to the first parameter, in order, that has its shape and its values (in the parameter's dtype)."""
    free, found = list(tensors), dict[torch.nn.Parameter, list[torch.Tensor]]()
    for parameter in parameters:
        for place, tensor in enumerate(free):
            if tensor.shape == parameter.shape and _same(tensor, parameter):
                found[parameter] = [free.pop(place)]
                break
    return found


def _same(tensor: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    return torch.equal(tensor.detach().to(parameter.device, parameter.dtype), parameter.detach())


def _collect(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, roots: set[_State]) -> Copies:
    """The copies at `roots`. `UsageError` if it is not clear whose they are."""
    found = Copies(optimizer, frozenset(key for where, key in roots if where == "state"))
    theirs = [p for group in optimizer.param_groups for p in group["params"]]
    for root in sorted(roots):
        kept = [tensor for other, tensor in _elsewhere(optimizer) if other == root]
        if [t.shape for t in kept] == [p.shape for p in theirs]:
            pairs = dict(zip(theirs, ([t] for t in kept), strict=True))
        else:
            pairs = _matched(parameters, kept)
        stale = not optimizer.state and not all(_same(tensor, p) for p, [tensor] in pairs.items())
        if stale or len(pairs) < len(kept):
            raise UsageError(
                f"{type(optimizer).__qualname__} keeps copies of the parameters in {root[1]!r} that differ from "
                "them: make the optimizer after the model was loaded, moved and cast, or give `on_adopt`"
            )
        for parameter, tensors in pairs.items():
            found.fixed.setdefault(parameter, []).extend(tensors)
    return found


def _elsewhere(optimizer: torch.optim.Optimizer) -> Iterator[tuple[_State, torch.Tensor]]:
    """Tensors outside of `state`, with what they are kept in: entries of groups, attributes."""
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                yield from ((("group", key), tensor) for tensor in _tensors(value))
    for name, value in vars(optimizer).items():
        if name not in ("param_groups", "state", "defaults"):
            yield from ((("attribute", name), tensor) for tensor in _tensors(value))


def _tensors(value: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry, depth - 1)


# --- trying out -----------------------------------------------------------------------------------------------


@dataclass
class _Rehearsal:
    """An optimizer of the same kind over stand-ins."""

    optimizer: torch.optim.Optimizer
    parameters: list[torch.nn.Parameter]

    def step(self, times: int) -> None:
        for _ in range(times):
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()

    def adopt(self, roots: set[_State]) -> None:
        """Everything one higher, as `Adopter` does it."""
        adopter = Adopter(_collect(self.parameters, self.optimizer, roots))
        adopter.put(("", p, p.detach().float() + 1.0) for p in self.parameters)


def _try_out(
    parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> tuple[set[_State], float | None]:
    """Where this kind of optimizer keeps copies, and the share left of what was adopted if it does not last."""
    make = _maker(parameters, optimizer)
    low, high, adopting = make(0.0), make(1.0), make(0.0)
    for rehearsal in (low, high, adopting):
        rehearsal.step(_WARM_UP)
    roots = _places(low, high)
    adopting.adopt(roots)
    for rehearsal in (low, high, adopting):
        rehearsal.step(_STEPS - _WARM_UP)
    for below, above, adopted in zip(low.parameters, high.parameters, adopting.parameters, strict=True):
        expected, got = float(_between(below, above)), float(_between(below, adopted))
        if not expected > 0.5:
            raise ValueError("without gradients it does not leave parameters where they are")
        if expected - got > _FADED:
            return roots, got / expected
    return roots, None


def _between(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return (high.detach().float() - low.detach().float()).mean()


def _places(low: _Rehearsal, high: _Rehearsal) -> set[_State]:
    """What is one higher in `high`, as its parameters are."""
    found: set[_State] = set()
    for below, above in zip(low.parameters, high.parameters, strict=True):
        there = high.optimizer.state.get(above, {})
        for key, value in low.optimizer.state.get(below, {}).items():
            if _is_place(value, there.get(key)) and value.shape == below.shape:
                found.add(("state", key))
    pairs = zip(_elsewhere(low.optimizer), _elsewhere(high.optimizer), strict=True)
    found |= {root for (root, tensor), (_, other) in pairs if _is_place(tensor, other)}
    return found


def _is_place(low: Any, high: Any) -> bool:
    if not (isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor) and low.shape == high.shape):
        return False
    return low.is_floating_point() and low.numel() > 0 and float(_between(low, high)) > 0.5


def _maker(parameters: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Callable[[float], _Rehearsal]:
    """What makes a rehearsal whose parameters begin so much higher."""

    def anew(offset: float) -> _Rehearsal:
        takes = inspect.signature(type(optimizer)).parameters
        settings = {key: value for key, value in optimizer.defaults.items() if key in takes}
        groups = [_stand_in_group(group, offset) for group in optimizer.param_groups]
        made = type(optimizer)(groups, **settings)
        return _Rehearsal(in_training(made), [p for group in groups for p in group["params"]])

    def whole(offset: float) -> _Rehearsal:
        mine = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        made = _double(optimizer, {id(p): double for p, double in zip(parameters, mine, strict=True)})
        _lift(made, mine, offset)
        return _Rehearsal(in_training(made), mine)

    try:
        anew(0.0)
    except Exception:
        if sum(p.numel() for p in parameters) > _SMALL:
            raise
        return whole
    return anew


def _double(optimizer: torch.optim.Optimizer, memo: dict[int, Any]) -> torch.optim.Optimizer:
    """A copy (torch's own leaves attributes out) that shares nothing with it: no hooks, no functions."""
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if "_hooks" not in name and not (name == "step" and callable(value))  # patched by schedulers
    }
    if odd := sorted(name for name, value in kept.items() if not _is_data(value)):
        raise ValueError(f"its attribute {odd[0]!r} cannot be copied")
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    made.__dict__.update(copy.deepcopy({**kept, "state": defaultdict(dict)}, memo))
    for name in vars(optimizer).keys() - kept.keys() - {"step"}:
        made.__dict__[name] = OrderedDict()
    return made


def _is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_data, value))
    if isinstance(value, dict):
        return all(_is_data(entry) for entry in value.values()) and type(value) in (dict, defaultdict, OrderedDict)
    return value is None or isinstance(value, (str, int, float, torch.Tensor, torch.dtype, torch.device))


def _lift(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], offset: float) -> None:
    """A copied optimizer somewhere else: with everything that equals a parameter."""
    kept = [*(p for group in optimizer.param_groups for p in group["params"]), *(t for _, t in _elsewhere(optimizer))]
    copies = _matched(parameters, [t for t in kept if all(t is not p for p in parameters)])
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(offset)
            for double in copies.get(parameter, ()):
                double.add_(offset)


def _stand_in_group(group: Mapping[str, Any], offset: float) -> dict[str, Any]:
    """The group's settings, and a stand-in for each number of dimensions."""
    kinds = {p.ndim: p for p in reversed(group["params"])}
    settings = {key: _setting(value) for key, value in group.items() if key != "params" and _is_setting(value)}
    if "lr" in settings and float(settings["lr"]) == 0:  # a warm-up that has not begun
        settings["lr"] = 1e-3
    return {**settings, "params": [_stand_in(p, offset) for p in kinds.values()]}


def _stand_in(parameter: torch.Tensor, offset: float) -> torch.nn.Parameter:
    shape = [max(1, min(size, _STAND_IN)) for size in parameter.shape]
    values = torch.empty(shape).numel()
    start = torch.arange(1, values + 1, dtype=torch.float32).remainder(7).sub(3.0).div(8).reshape(shape)
    return torch.nn.Parameter((start + offset).to(parameter.device, parameter.dtype))


def _is_setting(value: Any) -> bool:
    return all(tensor.numel() == 1 for tensor in _tensors(value))


def _setting(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def in_training(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Schedule-free optimizers have a mode, and step in one of them only."""
    if callable(train := getattr(optimizer, "train", None)):
        train()
    return optimizer


@contextmanager
def _undisturbed(parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """No random number is drawn from the user's generators."""
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        yield
