"""The callback for Hugging Face's Trainer, with a tiny random model against a real synchronizer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from anabranch.errors import LayoutMismatch, UsageError
from anabranch.model import unflatten
from anabranch.spec import RunSpec
from anabranch.workers.integrations.huggingface import AnabranchCallback, _Counter, _predictions
from anabranch.workers.muon import Muon
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT

EXAMPLES = Path(__file__).parents[2] / "examples"
ROWS, PREDICTIONS = 4, 31  # a micro-batch


@pytest.fixture(scope="module")
def hf_trainer() -> Iterator[Any]:
    """The example, for its model and its data."""
    sys.path.insert(0, str(EXAMPLES))
    yield import_module("hf_trainer")
    sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, hf_trainer: Any) -> Path:
    made = tmp_path_factory.mktemp("model")
    hf_trainer.make_tiny_model(made, hf_trainer.text_of(None))
    return made


@pytest.fixture
def data(folder: Path, hf_trainer: Any) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return hf_trainer.blocks(tokenizer, hf_trainer.text_of(None))


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def trainer_of(
    model: Any, data: Any, where: Path, *callbacks: Any, eval_dataset: Any = None, optimizers: Any = (None, None),
    **settings: Any,
) -> Any:  # fmt: skip
    standard: dict[str, Any] = {
        "max_steps": 10_000, "per_device_train_batch_size": ROWS, "learning_rate": 5e-3, "use_cpu": True,
        "save_strategy": "no", "report_to": "none", "lr_scheduler_type": "constant", "disable_tqdm": True,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(where), **{**standard, **settings})
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=eval_dataset,
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def spec_of(run: str, **sections: Any) -> RunSpec:
    return make_spec(run, task={"name": "x:Y", "options": {}}, **sections)


def run_model(run: Bench) -> dict[str, Any]:
    vault = run.synchronizer.vault
    assert vault is not None
    assert vault.layout is not None
    return unflatten(vault.layout, [version.theta for version in vault.versions])


def equal(model: Any, run: Bench) -> bool:
    there = run_model(run)
    return all(torch.equal(p.detach(), torch.from_numpy(there[n].copy())) for n, p in model.named_parameters())


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Notes what the model is at the begin of each step."""

    def __init__(self, run: Bench) -> None:
        self.run = run
        self.steps = 0
        self.as_the_run_at_first = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.steps == 0:
            self.as_the_run_at_first = equal(kwargs["model"], self.run)
        self.steps += 1


async def books_of(run: Bench, number: int = 0) -> Any:
    await wait_until(lambda: len(run.tape("closed")) > number, "its books are closed")  # the tape is what is stored
    return run.state.departed[number]


# --- taking part ----------------------------------------------------------------------------------------------


async def test_a_trainer_adopts_learns_and_stops_with_the_run(
    run_url: str, run_name: str, folder: Path, data: Any, tmp_path: Path
) -> None:
    """With gradient accumulation and evaluation in between: one step each for the run, of training tokens only."""
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    async with bench(run_url, spec_of(run_name)) as run:
        first = trainer_of(load(folder), data, tmp_path, AnabranchCallback(run.url, name="first"), max_steps=3)
        await asyncio.to_thread(first.train)
        await books_of(run)
        await run.settle()
        await run.command("resume")
        watch = Watch(run)
        trainer = trainer_of(
            model, data, tmp_path, AnabranchCallback(run.url, name="second"), watch,
            eval_dataset=data[:4], gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=10,
            logging_steps=5,
        )  # fmt: skip
        training = asyncio.create_task(asyncio.to_thread(trainer.train))
        await wait_until(lambda: min(run.versions()) >= 6, "it takes part")
        await run.command("stop")
        done = await training
        assert watch.as_the_run_at_first, "it begins with the global model, not its own"
        assert done.global_step == watch.steps < 10_000
        books = await books_of(run, 1)
        assert books.processed == watch.steps * 2 * ROWS * PREDICTIONS
        assert books.applied > 0
        assert trainer.state.log_history[0]["loss"] > done.training_loss
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_it_goes_on_from_a_checkpoint_with_the_runs_model(
    run_url: str, run_name: str, folder: Path, data: Any, tmp_path: Path
) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        where = {"save_strategy": "steps", "save_steps": 5}
        begun = trainer_of(load(folder), data, tmp_path, AnabranchCallback(run.url, name="w"), max_steps=5, **where)
        await asyncio.to_thread(begun.train)
        await books_of(run)
        await run.settle()
        await run.command("resume")
        watch = Watch(run)
        again = trainer_of(
            load(folder), data, tmp_path, AnabranchCallback(run.url, name="w"), watch, max_steps=9, **where
        )
        done = await asyncio.to_thread(again.train, resume_from_checkpoint=True)
        assert (done.global_step, watch.steps) == (9, 4)
        assert watch.as_the_run_at_first
        assert (await books_of(run, 1)).processed == 4 * ROWS * PREDICTIONS


async def test_a_trainer_with_muon_goes_on_from_its_checkpoint(
    run_url: str, run_name: str, folder: Path, data: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`accelerate` wraps the optimizer; nothing of it is taken for a copy of the parameters."""
    where = {"save_strategy": "steps", "save_steps": 5}
    momenta: list[dict[str, torch.Tensor]] = []

    class Momenta(transformers.TrainerCallback):  # type: ignore[misc]
        def note(self, optimizer: Any, model: Any) -> None:
            kept = {name: optimizer.state.get(p, {}).get("momentum_buffer") for name, p in model.named_parameters()}
            momenta.append({name: value.clone() for name, value in kept.items() if value is not None})

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note(kwargs["optimizer"], kwargs["model"])

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.note(kwargs["optimizer"], kwargs["model"])

    async with bench(run_url, spec_of(run_name)) as run:
        for steps, resume in ((5, False), (9, True)):
            model = load(folder)
            callback = AnabranchCallback(run.url, name="w")
            trainer = trainer_of(
                model,
                data,
                tmp_path,
                callback,
                Momenta(),
                max_steps=steps,
                optimizers=(Muon.of(model), None),
                **where,
            )
            done = await asyncio.to_thread(trainer.train, resume_from_checkpoint=resume)
            assert done.global_step == steps
            await books_of(run, int(resume))
            await run.settle()
            await run.command("resume")
        assert run.state.counts.get("ledger mismatches", 0) == 0
    begun, after, resumed, _ = momenta
    assert not begun
    assert len(after) == sum(p.ndim == 2 for p in load(folder).model.layers.parameters())
    assert resumed.keys() == after.keys()
    assert all(torch.equal(resumed[name], value) for name, value in after.items())
    assert "copies" not in caplog.text


async def test_the_learning_rate_may_follow_the_runs_tokens(
    run_url: str, run_name: str, folder: Path, data: Any, tmp_path: Path
) -> None:
    rates: list[float] = []

    class Rates(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    async with bench(run_url, spec_of(run_name)) as run:
        callback = AnabranchCallback(run.url, learning_rate=lambda tokens: 0.25 if tokens == 0 else 0.125)
        trainer = trainer_of(load(folder), data, tmp_path, callback, Rates(), learning_rate=1e-9)
        training = asyncio.create_task(asyncio.to_thread(trainer.train))
        await wait_until(lambda: 0.125 in rates, "the run has merged some")
        await run.command("stop")
        await training
    assert rates[0] == 0.25
    assert set(rates) == {0.25, 0.125}


async def test_an_error_in_training_leaves_without_a_contribution(
    run_url: str, run_name: str, folder: Path, data: Any, tmp_path: Path
) -> None:
    class Breaks(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise ArithmeticError("boom")

    async with bench(run_url, spec_of(run_name, rounds={"inner_steps": 100})) as run:

        def train() -> None:
            with AnabranchCallback(run.url, name="w") as callback:
                trainer_of(load(folder), data, tmp_path, callback, Breaks()).train()

        with pytest.raises(ArithmeticError, match="boom"):
            await asyncio.to_thread(train)
        books = await books_of(run)
        assert run.tape("gone")[0]["reason"] == "w left: ArithmeticError: boom"
        assert (books.processed, books.discarded) == (2 * ROWS * PREDICTIONS, 2 * ROWS * PREDICTIONS)


async def test_adapters_of_another_shape_are_refused_naming_the_tensor(
    run_url: str, run_name: str, folder: Path, data: Any, tmp_path: Path, hf_trainer: Any
) -> None:
    """And a model whose adapters alone are trained has nothing else in the run."""
    async with bench(run_url, spec_of(run_name)) as run:
        model = hf_trainer.with_adapters(load(folder))
        callback = AnabranchCallback(run.url, name="w")
        await asyncio.to_thread(trainer_of(model, data, tmp_path, callback, max_steps=2).train)
        names = list(run_model(run))
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in names
        assert all(".lora_" in name for name in names)
        whole = trainer_of(load(folder), data, tmp_path, AnabranchCallback(run.url, name="x"))
        with pytest.raises(LayoutMismatch, match=r"lm_head\.weight. exists here but not in the run"):
            await asyncio.to_thread(whole.train)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"load_best_model_at_end": True, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 500},
            "load_best_model_at_end = True: it must be False",
        ),
        ({"fsdp": True}, "fsdp = .*it must be empty"),
    ],
)
def test_what_would_train_other_parameters_is_refused(
    settings: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")  # transformers sets it, for good
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **settings)
    with pytest.raises(UsageError, match=words):
        AnabranchCallback("redis://127.0.0.1:1/0").on_train_begin(arguments, None, None, model=None)


# --- counting -------------------------------------------------------------------------------------------------


def tensor(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows)


def test_predictions_are_counted_as_the_trainer_does(folder: Path) -> None:
    causal = _predictions(load(folder))
    other = _predictions(torch.nn.Linear(1, 1))
    labels = tensor([1, 2, -100, 4], [-100, 2, 3, -100])
    mask = tensor([1, 1, 1, 0], [1, 1, 0, 0])
    ids = tensor([1, 2, 3, 0], [1, 2, 0, 0])
    assert causal({"labels": labels, "attention_mask": mask}) == 4, "the first label of a row predicts nothing"
    assert other({"labels": labels, "attention_mask": mask}) == 5
    assert causal({"shift_labels": labels, "labels": labels}) == 5
    assert causal({"input_ids": ids, "attention_mask": mask}) == 5
    assert causal({"input_ids": ids}) == 8
    assert other({"x": torch.ones(3, 7)}) == 3
    with pytest.raises(UsageError, match="pass tokens="):
        other({"scale": 2.0})


class Toy(torch.nn.Module):
    """As small as a model with a loss can be."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(16, 16)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: int | None = None
    ) -> dict[str, torch.Tensor]:
        reduction = "mean" if num_items_in_batch is None else "sum"
        logits = self.table(input_ids).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction=reduction)
        return {"loss": loss / (num_items_in_batch or 1)}


class Batched(Toy):
    """Called with one batch, as a mapping."""

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return super().forward(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("how", ["in order", "half in order", "one mapping", "a user's mapping", "*args"])
def test_a_model_may_be_called_in_any_way(how: str) -> None:
    ids = torch.arange(16).reshape(2, 8)
    batch: Any = {"input_ids": ids, "labels": ids}
    model: Any = (Batched() if "mapping" in how else Toy()).train()
    if how == "*args":
        model.forward = lambda *args: Toy.forward(model, *args)
    counter = _Counter(model, lambda inputs: next(v.numel() for v in inputs.values() if isinstance(v, torch.Tensor)))
    if how == "half in order":
        model(ids, labels=ids)
    elif "mapping" in how:
        model(batch if how == "one mapping" else transformers.BatchEncoding(batch))
    else:
        model(ids, ids)
    tokens, loss = counter.take()
    assert tokens == 16
    assert loss is not None


def test_predictions_in_one_mapping_are_counted() -> None:
    ids = torch.arange(16).repeat(3, 1)
    model = Batched().train()
    counter = _Counter(model, _predictions(model))
    model({"input_ids": ids, "labels": ids})
    assert counter.take()[0] == 48


@pytest.mark.parametrize("compiled", [False, True])
def test_tokens_and_loss_are_summed_over_a_step_and_not_over_evaluation(compiled: bool) -> None:
    model = Toy().train()
    counter = _Counter(model, _predictions(model))
    called: Any = torch.compile(model, backend="eager") if compiled else model
    batches = [torch.arange(16).reshape(2, 8), torch.arange(8).reshape(1, 8)]
    means = [called(input_ids=x, labels=x)["loss"].item() for x in batches]
    mean = (16 * means[0] + 8 * means[1]) / 24
    with torch.no_grad():
        called(input_ids=batches[0], labels=batches[0])
    model.eval()
    called(input_ids=batches[0], labels=batches[0])
    model.train()
    tokens, loss = counter.take()
    assert loss is not None
    assert tokens == 24
    assert float(loss) == pytest.approx(mean)
    for x in batches:
        called(input_ids=x, labels=x, num_items_in_batch=24)
    tokens, loss = counter.take()
    assert loss is not None
    assert tokens == 24
    assert float(loss) == pytest.approx(mean)
    assert counter.take() == (0, None)
    counter.remove()
    called(input_ids=batches[0], labels=batches[0])
    assert counter.take() == (0, None)
