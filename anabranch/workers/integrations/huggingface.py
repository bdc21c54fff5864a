"""Hugging Face `Trainer`: one callback joins its training to a run.

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[AnabranchCallback(url)])
    trainer.train()

What happens when: at the begin of training (after a checkpoint to resume from was loaded) the session joins, and the
global model replaces the model's trainable parameters. At the end of every optimizer step its tokens are reported and
merged fragments adopted; the micro-batches of gradient accumulation count together. When the run stops, the Trainer
stops. At the end of training a last contribution is made.

*Tokens* are predictions the loss is made of: labels other than -100 (shifted ones for causal language models, as the
Trainer counts them); where the model sees no labels, the attention mask; else all input ids; else examples. Pass
`tokens` to count otherwise. *Loss* is the mean over these, as the model returned it; where it returns none (label
smoothing, `compute_loss_func`), what the Trainer logs.

Kept: the optimizer's state, the Trainer's own learning-rate schedule (which counts this worker's steps; pass
`learning_rate` to follow the run's tokens instead), frozen parameters and buffers. With PEFT only the adapters are
trainable, so only they are synchronized: all members need the same base model. Evaluation and checkpoints during
training are of this worker's live model.

With `fp16` or `bf16` parameters stay float32 and nothing changes. A model whose *parameters* are half precision
rounds whatever it adopts, and small updates are lost: load it as float32.

Under torchrun all ranks act as one worker (`anabranch.workers.island`). Refused with `UsageError`: FSDP and DeepSpeed
(their optimizers own the parameters), `torch.nn.DataParallel`, and `load_best_model_at_end`, after which the last
contribution would lead back to an old model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from anabranch.errors import UsageError
from anabranch.queue.url import RunUrl
from anabranch.workers.checked import real, whole
from anabranch.workers.copies import OnAdopt
from anabranch.workers.joining import join
from anabranch.workers.trains import Trains

Count = int | torch.Tensor  # a scalar; reading it waits for the device, so that is left for the end of the step
IGNORED = -100  # a label that is no prediction


class AnabranchCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by mypy
    """One worker's part in a run, for `Trainer(callbacks=[...])`.

    As a context manager it also leaves the run when training fails: without contributions, since what broke in the
    middle of a step is nobody's model. Otherwise a failed worker is gone once its process has ended, or when the
    callback trains again.
    """

    def __init__(
        self,
        url: str | RunUrl,
        *,
        name: str | None = None,
        label: str = "",
        duty: float = 1.0,
        warm_start: bool = False,
        tokens: Callable[[Mapping[str, Any]], Count] | None = None,
        learning_rate: Callable[[int], float] | None = None,
        on_adopt: OnAdopt | None = None,
    ) -> None:
        """`url`, `name`, `label`, `duty`, `warm_start`, `on_adopt`: as for `anabranch.join`.

        `tokens`: from a model's arguments by name (one micro-batch; the entries of a batch that is passed as one
        mapping, too) how many tokens it trains on, at least 0.
        `learning_rate`: from the tokens that the whole run has merged to the rate of every parameter group, instead
        of the Trainer's schedule (which goes on being logged).
        """
        self.session: Trains | None = None
        self._url = url
        duty = real("duty", duty, above=0, most=1)
        self._options: dict[str, Any] = {
            "name": name, "label": label, "duty": duty, "warm_start": warm_start, "on_adopt": on_adopt
        }  # fmt: skip
        self._count_tokens = tokens
        self._learning_rate = learning_rate
        self._counter: _Counter | None = None
        self._logged_loss: float | None = None

    # --- what the Trainer calls ---------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join and adopt the global model. Raises what `anabranch.join` raises, and `UsageError` (see above)."""
        self._leave("training began anew", contribute=False)
        _check(args)
        model = kwargs["model"]
        self.session = join(self._url, model, kwargs.get("optimizer"), **self._options)
        self._counter = _Counter(model, self._count_tokens or _predictions(model))
        if self.session.stopped:
            control.should_training_stop = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.session is not None and self._learning_rate is not None:
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = self._learning_rate(self.session.tokens)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """After the optimizer's step and with gradients zeroed: a step boundary."""
        if self.session is None or self._counter is None:
            return
        tokens, loss = self._counter.take()
        if getattr(kwargs.get("optimizer"), "step_was_skipped", False):
            return  # gradients overflowed under fp16: nothing was trained, on any rank
        self.session.step(max(1, tokens), self._logged_loss if loss is None else loss)
        if self.session.stopped:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs and isinstance(loss := logs.get("loss"), float):
            self._logged_loss = loss

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave, with a last contribution."""
        session = self.session
        self._leave((session.stopped if session is not None else None) or "done", contribute=True)

    # --- life ---------------------------------------------------------------------------------------------

    def close(self, reason: str = "done") -> None:
        """Leave the run without a last contribution, if training did not end in order. Safe to call twice."""
        self._leave(reason, contribute=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close("training was left")
        elif (session := self._let_go()) is not None:
            session.__exit__(kind, error, trace)

    def _leave(self, reason: str, *, contribute: bool) -> None:
        if (session := self._let_go()) is not None:
            session.close(reason, contribute=contribute)

    def _let_go(self) -> Trains | None:
        """The session, which is to be left; nothing is counted for it any more."""
        if self._counter is not None:
            self._counter.remove()
        session, self.session, self._counter = self.session, None, None
        return session


def _check(args: TrainingArguments) -> None:
    """`UsageError` for what would train something else than the parameters a run gives and takes."""
    if args.load_best_model_at_end:
        raise UsageError(
            "load_best_model_at_end = True: it must be False, because the run has one model and this worker's last "
            "contribution would lead back to an old one; let an `anabranch evaluator` watch the loss"
        )
    for setting in ("fsdp", "deepspeed"):
        if getattr(args, setting, None):
            raise UsageError(
                f"{setting} = {getattr(args, setting)!r}: it must be empty, because the model is sharded then, which "
                "a run cannot synchronize yet; use DistributedDataParallel (torchrun without it), or one process"
            )
    if args.n_gpu > 1:
        raise UsageError(
            f"n_gpu = {args.n_gpu}: the Trainer would use torch.nn.DataParallel; start it with "
            f"`torchrun --nproc-per-node {args.n_gpu}`, or let it see one device (CUDA_VISIBLE_DEVICES=0)"
        )


class _Counter:
    """Counts tokens and sums the loss over the micro-batches of a step, in a hook on the model's forward pass."""

    def __init__(self, model: torch.nn.Module, count: Callable[[Mapping[str, Any]], Count]) -> None:
        self._count = count
        self._tokens: Count = 0
        self._loss: torch.Tensor | None = None
        # Not traced by torch.compile: what a hook adds up in Python would be compiled away.
        hook = torch.compiler.disable(self._after_forward)  # type: ignore[no-untyped-call]
        self._handle = model.register_forward_hook(hook, with_kwargs=True)

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if not (module.training and torch.is_grad_enabled()):
            return  # evaluation
        kwargs = _by_name(module, args, kwargs)
        tokens = self._count(kwargs)
        if not isinstance(tokens, torch.Tensor):  # a tensor is read at the end of the step
            tokens = whole("tokens", tokens, 0)
        self._tokens = self._tokens + tokens
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # With `num_items_in_batch` the model divided by the tokens of the whole step, else by its own.
            share = kwargs.get("num_items_in_batch")
            total = loss.detach().float() * (tokens if share is None else share)
            self._loss = total if self._loss is None else self._loss + total

    def take(self) -> tuple[int, torch.Tensor | None]:
        """Tokens since the last call, and their mean loss (nats per token; None if the model returned none)."""
        tokens, total = whole("tokens", self._tokens, 0), self._loss
        self._tokens, self._loss = 0, None
        return tokens, None if total is None else total / max(1, tokens)

    def remove(self) -> None:
        self._handle.remove()


def _by_name(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a model was called with, however it was: one batch as a mapping, or in order."""
    if not args:
        return kwargs
    bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    named: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, tuple):  # *args
            named |= {f"{name}{place}": entry for place, entry in enumerate(value)}
        else:
            named[name] = value
    for value in list(named.values()):
        if isinstance(value, Mapping):
            named = {**value, **named}
    return named


def _predictions(model: torch.nn.Module) -> Callable[[Mapping[str, Any]], Count]:
    """How to count the predictions in this model's batches."""
    shifted = _shifts_labels(model)

    def count(inputs: Mapping[str, Any]) -> Count:
        if isinstance(labels := inputs.get("shift_labels"), torch.Tensor):
            return labels.ne(IGNORED).sum()
        if isinstance(labels := inputs.get("labels"), torch.Tensor):
            return (labels[..., 1:] if shifted and labels.ndim > 1 else labels).ne(IGNORED).sum()
        if isinstance(mask := inputs.get("attention_mask"), torch.Tensor) and mask.ndim == 2:
            return mask.sum()
        if isinstance(ids := inputs.get("input_ids"), torch.Tensor):
            return ids.numel()
        rows = next((len(value) for value in inputs.values() if isinstance(value, torch.Tensor) and value.ndim), None)
        if rows is None:
            raise UsageError(
                f"nothing the model was called with ({', '.join(inputs) or 'no arguments'}) says how many tokens it "
                "trains on: pass tokens=, a function of the model's arguments by name, to AnabranchCallback"
            )
        return rows

    return count


def _shifts_labels(model: torch.nn.Module) -> bool:
    """Whether the model's loss compares each position with the label after it, as the Trainer finds out."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    wrapped: Any = model
    inner = wrapped.get_base_model() if hasattr(wrapped, "get_base_model") else wrapped  # PEFT
    encoder_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    return LOSS_MAPPING.get(getattr(inner, "loss_type", None)) is ForCausalLMLoss and not encoder_decoder
