"""The task `hf`: options, tokens, learning, LoRA, and what a run of it leaves behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from anabranch.errors import CheckpointError, LayoutMismatch, SpecError, UsageError
from anabranch.model import unflatten
from anabranch.spec import parse_spec
from anabranch.workers.adapters import check_adapters
from anabranch.workers.evaluator import heldout_loss
from anabranch.workers.export import ExportOptions, export_checkpoint
from anabranch.workers.muon import Muon
from anabranch.workers.run import Ending, MemberOptions, run_evaluator, run_worker
from anabranch.workers.sample import sample_checkpoint
from anabranch.workers.session import Session
from anabranch.workers.tasks.base import SharedTask
from anabranch.workers.tasks.hf import HFTask, checksum_of
from anabranch.workers.tensors import trainable
from tests.harness import bench, make_spec, process
from tests.saved import entries, save_model
from tests.wait import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT

EXAMPLES = Path(__file__).parents[2] / "examples"
LORA = {"lora": True, "lora_r": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with its tokenizer."""
    sys.path.insert(0, str(EXAMPLES))
    example: Any = import_module("hf_trainer")
    sys.path.remove(str(EXAMPLES))
    made = tmp_path_factory.mktemp("model")
    example.make_tiny_model(made, example.text_of(None))
    return made


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text: this test's own package."""
    copied = tmp_path_factory.mktemp("text") / "text"
    shutil.copytree(EXAMPLES.parent / "anabranch" / "workers", copied, ignore=shutil.ignore_patterns("__pycache__"))
    return copied


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def task_of(folder: Path, text: Path, **options: Any) -> HFTask:
    standard = {"model": str(folder), "data": str(text), "context": 32, "learning_rate": 5e-3, "warmup_tokens": 0}
    return HFTask({**standard, **options})


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modle": "x"}, r"task\.options\.modle = 'x' is unknown: the task hf knows batch, .*model"),
        ({"lora": 1}, r"task\.options\.lora = 1 is not of type bool"),
        ({"context": 0}, r"task\.options\.context = 0: it must be at least 1"),
        ({"dtype": "int8"}, r"task\.options\.dtype = 'int8': it must be one of float32, bfloat16"),
        ({"lora_targets": " , "}, r"task\.options\.lora_targets = ' , ': it must be all-linear, or names of modules"),
        ({"optimizer": "sgd"}, r"task\.options\.optimizer = 'sgd': it must be one of adamw, muon"),
        ({"learning_rate": 2.0}, r"task\.options\.learning_rate = 2\.0: it must be above 0, at most 1"),
        ({}, r"task\.options\.model = '': no folder with a config\.json on this machine; name one with --model"),
        ({"model": "no/where"}, r"'no/where': no folder with a config\.json"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        HFTask(options)


def test_a_window_longer_than_the_model_reads_is_refused(folder: Path, text: Path) -> None:
    with pytest.raises(SpecError, match=r"context = 257: it must be at most the model's max_position_\w+ = 256"):
        task_of(folder, text, context=257).build_model()


def test_unknown_adapter_targets_are_refused(folder: Path, text: Path) -> None:
    with pytest.raises(SpecError, match=r"lora_targets = 'nothing': .*nothing"):
        task_of(folder, text, lora=True, lora_targets="nothing").build_model()


def test_another_folder_than_the_runs_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    """With LoRA no tensor would tell: the frozen weights are not in the run."""
    checksum = checksum_of(folder)
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    task_of(copied, text, checksum=checksum, **LORA).build_model()
    with (copied / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    with pytest.raises(SpecError, match=rf"checksum = '{checksum}': it must be this folder's, [0-9a-f]{{16}}"):
        task_of(copied, text, checksum=checksum, **LORA).build_model()


def test_a_folder_without_a_tokenizer_is_refused(folder: Path, text: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(folder / name, tmp_path / name)
    with pytest.raises(SpecError, match="has no tokenizer that can be loaded"):
        task_of(tmp_path, text).heldout_batches()


def test_a_missing_library_says_what_to_install(folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match=r"needs peft: pip install 'anabranch\[hf\]'"):
        task_of(folder, text, **LORA).build_model()


def test_two_threads_that_load_at_once_leave_transformers_as_it_was(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its patches are not undone if they overlap, and no model of this process has tied weights from then on."""
    ties = transformers.PreTrainedModel.tie_weights
    monkeypatch.setattr(transformers.PreTrainedModel, "tie_weights", ties)  # put back, whatever happens here
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: task_of(folder, text).build_model(), range(8)))
    assert transformers.PreTrainedModel.tie_weights is ties


# --- data -----------------------------------------------------------------------------------------------------


def test_text_becomes_tokens_once_and_is_mapped(
    folder: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = task_of(folder, text)
    dataset = task.dataset()
    assert isinstance(task, SharedTask)
    assert isinstance(task._tokens.train, np.memmap)
    assert task._tokens.train.dtype == np.uint16
    everything = task.tokenizer.decode(np.concatenate([task._tokens.train, task._tokens.heldout]).tolist())
    for path in text.rglob("*.py"):
        assert path.read_text() in everything
    batch = dataset.batch(np.array([0, 5]), 0)
    assert batch.inputs.shape == batch.targets.shape == (2, 32)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    with monkeypatch.context() as patch:
        patch.setattr("anabranch.workers.tokens._tokens", None)
        assert task_of(folder, text).dataset().fingerprint == dataset.fingerprint, "from the cache"
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(text, elsewhere)
    assert task_of(folder, elsewhere).dataset().fingerprint == dataset.fingerprint, "alike on every machine"


def test_text_in_another_encoding_is_an_error_or_converted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("naïve, à la café. " * 500, encoding="latin-1")
    with pytest.raises(UsageError, match=r"a\.txt is not utf-8: byte 0xef at 2"):
        task_of(folder, tmp_path).dataset()
    tokens = task_of(folder, tmp_path, encoding="latin-1")._tokens.train
    (tmp_path / "a.txt").write_text("naïve, à la café. " * 500, encoding="utf-8")
    assert np.array_equal(task_of(folder, tmp_path)._tokens.train[:500], tokens[:500])
    with pytest.raises(SpecError, match=r"task\.options\.encoding = 'nonsense': it must be a text encoding"):
        task_of(folder, tmp_path, encoding="nonsense")


def test_characters_between_pieces_of_a_file_are_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("东京" * 2000, encoding="utf-8")
    whole = task_of(folder, tmp_path).tokenizer.decode(task_of(folder, tmp_path)._tokens.train)
    monkeypatch.setattr("anabranch.workers.tokens._PIECE_BYTES", 1000)  # no multiple of 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = task_of(folder, tmp_path)
    assert task.tokenizer.decode(task._tokens.train).count("东京") >= 0.99 * whole.count("东京") > 0


def test_batches_repeat_for_a_worker_and_differ_between_workers(folder: Path, text: Path) -> None:
    task = task_of(folder, text)
    one, again, other = (next(task.batches(1, name)) for name in ("a", "a", "b"))
    assert torch.equal(one.inputs, again.inputs)
    assert not torch.equal(one.inputs, other.inputs)
    heldout = task.heldout_batches()
    assert sum(batch.inputs.shape[0] for batch in heldout) == 64
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(heldout, task.heldout_batches(), strict=True))


def test_too_little_text_says_so(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words")
    with pytest.raises(UsageError, match=r"are too short|add text or choose a smaller task\.options\.context"):
        task_of(folder, tmp_path).heldout_batches()


# --- training -------------------------------------------------------------------------------------------------


LEARNS: dict[str, dict[str, Any]] = {
    "full": {}, "lora": LORA, "lora, bfloat16": {**LORA, "dtype": "bfloat16"}, "muon": {"optimizer": "muon"},
    "muon, lora": {**LORA, "optimizer": "muon", "learning_rate": 2e-2},
}  # fmt: skip


@pytest.mark.parametrize("options", LEARNS.values(), ids=LEARNS)
def test_it_learns(folder: Path, text: Path, options: dict[str, Any]) -> None:
    task = task_of(folder, text, **options)
    torch.manual_seed(0)
    model = task.build_model()
    named = dict(trainable(model))
    assert all((".lora_" in name) == options.get("lora", False) for name in named)
    assert all(parameter.dtype == torch.float32 for parameter in named.values()), "what is trained is float32"
    frozen = {parameter.dtype for parameter in model.parameters() if not parameter.requires_grad}
    assert frozen == ({getattr(torch, options.get("dtype", "float32"))} if options.get("lora") else set())
    optimizer = task.build_optimizer(model)
    if isinstance(optimizer, Muon):
        matrices = {id(p) for group in optimizer.param_groups if group["matrices"] for p in group["params"]}
        assert {name for name, p in named.items() if id(p) in matrices} == {
            name for name, p in named.items() if p.ndim == 2 and "embed" not in name and "head" not in name
        }
    assert heldout_loss(task, model, task.heldout_batches()) == pytest.approx(math.log(384), abs=0.2)
    batch = next(task.batches(0, "w"))  # always the same: adapters alone learn too little of other text
    losses = []
    for _ in range(40):
        loss: Any = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.2
    said = task.sample(model.eval(), "def ", 5, 0.0, 0)
    assert said == task.sample(model, "def ", 5, 0.0, 1)


@pytest.mark.slow
async def test_workers_with_their_own_places_fine_tune_one_checkpoint(
    run_url: str, run_name: str, folder: Path, text: Path, tmp_path: Path
) -> None:
    """`anabranch worker URL --task hf --model DIR --data DIR --lora`, who does not fit, sample and export."""
    own = {"context": 32, "batch": 2, "learning_rate": 1e-2, "lora": True}
    spec = make_spec(run_name, task={"name": "hf", "options": own})
    places = ("--model", str(folder), "--data", str(text), "--lora")
    (tmp_path / "run").mkdir()
    async with bench(run_url, spec, directory=tmp_path / "run", drain_s=60.0) as run:
        with process("worker", run_url, "--name", "w", "--task", "hf", *places) as worker:
            await run.reach(3)
            whole = MemberOptions(name="x", task_options={"model": str(folder), "data": str(text), "lora": False})
            with pytest.raises(LayoutMismatch, match=r"this model is not the run's: .*lm_head\.weight"):
                await asyncio.to_thread(run_worker, run.url, whole, Ending())
            await run.command("stop")
            said = (await asyncio.to_thread(worker.communicate, timeout=60))[0].decode()
            assert worker.returncode == 0, said
            assert f"model folder: checksum {checksum_of(folder)}" in said
        assert run.state.counts.get("ledger mismatches", 0) == 0
    options = {"model": str(folder), "lora": True}
    assert sample_checkpoint(tmp_path / "run", "def ", 5, 0.0, 0, options=options).startswith("def ")
    written = export_checkpoint(tmp_path / "run", tmp_path / "out", ExportOptions(config=folder))
    assert written == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
async def test_a_whole_model_is_fine_tuned_measured_and_exported(
    run_url: str,
    run_name: str,
    folder: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    optimizer: str,
) -> None:
    monkeypatch.setattr(os, "nice", lambda by: by)  # this process is not the evaluator's own
    options = {
        "model": str(folder), "data": str(text), "context": 32, "batch": 2, "learning_rate": 1e-2,
        "optimizer": optimizer,
    }  # fmt: skip
    spec = make_spec(run_name, task={"name": "hf", "options": options})
    (tmp_path / "run").mkdir()
    async with bench(run_url, spec, directory=tmp_path / "run", drain_s=60.0) as run:
        members = [
            asyncio.to_thread(run_worker, run.url, MemberOptions(name="w"), Ending()),
            asyncio.to_thread(run_evaluator, run.url, MemberOptions(name="e", every_s=0.1), Ending()),
        ]
        taking_part = asyncio.gather(*members)
        await run.reach(2)
        await wait_until(lambda: len(run.state.heldout) >= 2, "two measurements")
        await run.command("stop")
        await taking_part
        roles = {m.role for m in run.state.members.values()} | {d.role for d in run.state.departed}
        assert roles == {"worker", "evaluator"}
    vault = run.synchronizer.vault
    assert vault is not None
    assert vault.layout is not None
    trained = unflatten(vault.layout, [version.theta for version in vault.versions])
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    ours: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    before, after = dict(theirs.named_parameters()), dict(ours.named_parameters())
    for name, theta in trained.items():
        assert np.array_equal(after[name].detach().numpy(), theta), name
    assert any(not torch.equal(before[name], after[name]) for name in trained), "it was trained"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").decode([1]) is not None


# --- export ---------------------------------------------------------------------------------------------------


async def test_exported_adapters_are_what_peft_loads(folder: Path, text: Path, tmp_path: Path) -> None:
    import peft

    task = task_of(folder, text, **LORA)
    model = task.build_model().eval()
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.normal_(std=0.1)
    tensors = {name: parameter.detach().numpy() for name, parameter in trainable(model)}
    spec = parse_spec({"rounds": {"fragments": 2}, "task": {"name": "hf", "options": {**LORA, "model": str(folder)}}})
    where = await save_model(tmp_path / "c", spec, tensors)
    export_checkpoint(where, tmp_path / "out")
    assert entries(tmp_path / "out") == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "out"
    )
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)
    ours: Any = model
    ours.save_pretrained(tmp_path / "peft")
    theirs = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert theirs.keys() == load_file(tmp_path / "out" / "adapter_model.safetensors").keys()


PEFT = [
    {"alpha_pattern": {"q_proj": 3}}, {"rank_pattern": {"layers.0.self_attn.q_proj": 4}}, {"use_rslora": True},
    {"use_dora": True}, {"init_lora_weights": "gaussian"}, {"modules_to_save": ["lm_head", "norm"]},
    {"target_modules": ["q_proj", "embed_tokens"]},
]  # fmt: skip


@pytest.mark.parametrize("settings", PEFT, ids=lambda settings: next(iter(settings)))
async def test_what_decides_an_adapters_effect_survives_export(
    folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    chosen = {"r": 2, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"], **settings}
    model: Any = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **chosen)).eval()
    check_adapters(model)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(torch.randn_like(parameter) * 0.1)
    tensors = {name: parameter.detach().numpy() for name, parameter in trainable(model)}
    spec = parse_spec({"rounds": {"fragments": 2}, "task": {"name": "own.module:Task"}})
    where = await save_model(tmp_path / "c", spec, tensors)
    model.save_pretrained(tmp_path / "peft", save_embedding_layers=False)
    export_checkpoint(where, tmp_path / "out", ExportOptions(config=tmp_path / "peft"))
    loaded = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "out"
    )
    ids = torch.arange(12).reshape(1, 12)
    assert torch.equal(loaded.eval()(input_ids=ids).logits, model(input_ids=ids).logits)


def write_config(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"r": 5}, "has adapters of rank 4, the config says 5"),
        ({"rank_pattern": {"q_proj": 9}}, r"q_proj has adapters of rank 4, the config says 9"),
        ({"use_dora": True}, "use_dora is True, the checkpoint has no magnitude vectors"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changed the base model"),
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA', the checkpoint has LoRA adapters"),
    ],
)
async def test_a_config_of_other_adapters_is_refused(
    folder: Path, text: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    model: Any = task_of(folder, text, **LORA).build_model()
    tensors = {name: parameter.detach().numpy() for name, parameter in trainable(model)}
    spec = parse_spec({"rounds": {"fragments": 2}, "task": {"name": "own.module:Task"}})
    where = await save_model(tmp_path / "c", spec, tensors)
    model.save_pretrained(tmp_path / "peft")
    config = write_config(tmp_path / "peft", **changes)
    with pytest.raises(CheckpointError, match=words):
        export_checkpoint(where, tmp_path / "out", ExportOptions(config=config))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_that_change_the_base_are_refused_when_they_join(folder: Path, init: str) -> None:
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], init_lora_weights=init)
    with pytest.raises(UsageError, match=f"init_lora_weights = '{init}', which may leave every member with other"):
        Session("redis://127.0.0.1:1/0", peft.get_peft_model(base, settings)).start()


async def test_adapters_of_another_trainer_need_their_config(folder: Path, text: Path, tmp_path: Path) -> None:
    model: Any = task_of(folder, text, **LORA).build_model()
    tensors = {name: parameter.detach().numpy() for name, parameter in trainable(model)}
    spec = parse_spec({"rounds": {"fragments": 2}, "task": {"name": "own.module:Task"}})
    where = await save_model(tmp_path / "c", spec, tensors)
    with pytest.raises(UsageError, match=r"how they are scaled \(lora_alpha\): name the adapter_config\.json"):
        export_checkpoint(where, tmp_path / "out")
    model.save_pretrained(tmp_path / "peft")
    assert len(export_checkpoint(where, tmp_path / "out", ExportOptions(config=tmp_path / "peft"))) == 2
    more = {**tensors, "base_model.model.score.weight": np.ones((2, 2), np.float32)}
    where = await save_model(tmp_path / "d", spec, more)
    with pytest.raises(CheckpointError, match=r"score\.weight.* is no weight of a LoRA adapter.*safetensors"):
        export_checkpoint(where, tmp_path / "other", ExportOptions(config=tmp_path / "peft"))
