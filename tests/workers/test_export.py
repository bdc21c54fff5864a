"""`anabranch export`: what transformers loads is the checkpoint bit for bit, and what does not fit is named."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.errors import CheckpointError, UsageError
from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.export import CONFIG, INDEX, WEIGHTS, ExportOptions, export_checkpoint
from anabranch.workers.tensors import buffers_of, trainable
from tests.saved import entries, flip, memory_url, save_model

SPEC = parse_spec({"rounds": {"fragments": 3}, "task": {"name": "own.module:Task"}})
TINY = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}


def llama(**options: Any) -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=4096,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            **{"tie_word_embeddings": False, **TINY, **options},
        )
    )


def gpt2(**options: Any) -> Any:
    config = {"vocab_size": 4096, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**config, **TINY, **options}))


def parameters(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What a worker of this model synchronizes."""
    return {name: parameter.detach().numpy() for name, parameter in trainable(model)}


def config_of(model: Any, folder: Path, **changes: Any) -> Path:
    """The model's config.json in a folder, as a person who trains it has it."""
    folder.mkdir(exist_ok=True)
    written = {**model.config.to_dict(), "architectures": [type(model).__name__], **changes}
    (folder / CONFIG).write_text(json.dumps(written))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2], ids=["llama, untied", "gpt2, tied"])
async def test_from_pretrained_gives_the_checkpoint_bit_for_bit(tmp_path: Path, make: Callable[[], Any]) -> None:
    torch.manual_seed(3)
    model = make().eval()
    where = await save_model(memory_url(), SPEC, parameters(model))
    out = tmp_path / "out"
    written = export_checkpoint(where, out, ExportOptions(config=config_of(model, tmp_path / "c"), max_shard_mb=1))
    shards = [name for name in written if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name)]
    assert len(shards) >= 2
    assert set(written) == {CONFIG, INDEX, *shards}
    index = json.loads((out / INDEX).read_text())
    for name in shards:
        assert (out / name).stat().st_size < 1_000_000 + 64 * 1024 or len(load_file(out / name)) == 1
        assert set(load_file(out / name)) == {k for k, v in index["weight_map"].items() if v == name}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in parameters(model).values())

    loaded, report = type(model).from_pretrained(out, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = dict(loaded.named_parameters(remove_duplicate=False))
    wanted = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == wanted.keys()
    for name, parameter in wanted.items():
        assert torch.equal(found[name], parameter), name
    prompt = torch.tensor([[5, 6, 7]])
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(prompt, **options), model.generate(prompt, **options))


async def test_one_file_if_it_suffices_and_the_tokenizer_comes_along(tmp_path: Path) -> None:
    model = gpt2(vocab_size=64)
    where = await save_model(tmp_path / "run" / "checkpoints", SPEC, parameters(model))
    config = config_of(model, tmp_path / "c", dtype="bfloat16")
    (config / "tokenizer.json").write_text("{}")
    (config / "training_args.bin").write_text("not ours")
    assert export_checkpoint(tmp_path / "run", tmp_path / "out", ExportOptions(config=config)) == [
        CONFIG,
        WEIGHTS,
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["dtype"] == "float32", "as written, not as trained"
    assert set(load_file(tmp_path / "out" / WEIGHTS)) == set(parameters(model))
    export_checkpoint(where, tmp_path / "again", ExportOptions(config=config / CONFIG))
    assert entries(tmp_path / "again") == [CONFIG, WEIGHTS], "a file brings nothing along"


async def test_the_config_of_the_task_is_the_default(tmp_path: Path) -> None:
    model = gpt2(vocab_size=64)
    named = str(config_of(model, tmp_path / "c"))
    task = {"name": "own.module:Task", "options": {"model": named}}
    where = await save_model(tmp_path, parse_spec({"rounds": {"fragments": 3}, "task": task}), parameters(model))
    assert export_checkpoint(where, tmp_path / "out") == [CONFIG, WEIGHTS]
    task["options"] = {"model": "some/hub-name"}
    where = await save_model(tmp_path, parse_spec({"rounds": {"fragments": 3}, "task": task}), parameters(model))
    with pytest.raises(UsageError, match=r"task\.options\.model = 'some/hub-name' is no folder .* --config"):
        export_checkpoint(where, tmp_path / "other")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("gpt", r"built-in byte-level GPT, which is no transformers architecture: use --format safetensors"),
        ("own.module:Task", r"does not say which architecture .*--config, or use --format safetensors"),
    ],
)
async def test_without_a_config_it_is_said_what_to_do(tmp_path: Path, task: str, message: str) -> None:
    spec = parse_spec({"rounds": {"fragments": 1}, "task": {"name": task}})
    where = await save_model(tmp_path / "c", spec, {"a": np.ones((2, 2))})
    with pytest.raises(UsageError, match=message):
        export_checkpoint(where, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert export_checkpoint(where, tmp_path / "out", ExportOptions("safetensors")) == [WEIGHTS]
    np.testing.assert_array_equal(load_file(tmp_path / "out" / WEIGHTS)["a"], np.ones((2, 2)))


# --- what does not fit ------------------------------------------------------------------------------------------


async def exported(tmp_path: Path, tensors: dict[str, Any], config: Path, spec: RunSpec = SPEC) -> Path:
    where = await save_model(tmp_path / "c", spec, tensors)
    export_checkpoint(where, tmp_path / "out", ExportOptions(config=config))
    return tmp_path / "out"


async def test_a_missing_unexpected_or_misshapen_tensor_is_named(tmp_path: Path) -> None:
    model = gpt2(vocab_size=64)
    config = config_of(model, tmp_path / "config")
    whole = parameters(model)
    name = "transformer.h.1.attn.c_attn.weight"
    cases: list[tuple[dict[str, Any], str]] = [
        ({k: v for k, v in whole.items() if k != name}, f"lacks the tensor '{name}'"),
        ({**whole, "extra": np.ones(3)}, r"'extra' \(one of 1\), which GPT2LMHeadModel does not have"),
        ({**whole, name: np.ones((3, 3))}, rf"{name} has shape \(3, 3\), the architecture's has \(64, 192\)"),
    ]
    for tensors, message in cases:
        with pytest.raises(CheckpointError, match=message):
            await exported(tmp_path, tensors, config)
        assert not (tmp_path / "out").exists()


async def test_a_tied_tensor_may_be_there_once_under_either_name_or_twice_alike(tmp_path: Path) -> None:
    model = gpt2(vocab_size=64)
    config = config_of(model, tmp_path / "config")
    first, second = "transformer.wte.weight", "lm_head.weight"
    whole = parameters(model)
    assert second not in whole
    twice = {**whole, second: whole[first].copy()}
    out = await exported(tmp_path, twice, config)
    assert set(load_file(out / WEIGHTS)) == set(whole), "the second copy is dropped, as transformers does"
    twice[second][0, 0] += 1
    with pytest.raises(CheckpointError, match=rf"{first} and {second} differ.* tie_word_embeddings: false"):
        await exported(tmp_path / "b", twice, config)
    neither = {k: v for k, v in whole.items() if k != first}
    with pytest.raises(CheckpointError, match=rf"lacks the tensor '{first}' \(tied with {second}\)"):
        await exported(tmp_path / "c", neither, config)


async def test_buffers_that_a_run_trained_are_exported(tmp_path: Path) -> None:
    """Also to an architecture of transformers; those that it did not train are the base model's."""
    torch.manual_seed(2)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], num_labels=2)
    model = transformers.ResNetForImageClassification(config)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model(torch.randn(2, 3, 32, 32))  # in training mode: running averages move
    buffers = buffers_of(model, SPEC.merge)
    trained = {name: buffer.value.numpy() for name, buffer in buffers.items() if buffer.value is not None}
    assert len(trained) == len(list(model.buffers())) > 2
    where = await save_model(
        memory_url(), SPEC, {**parameters(model), **trained}, {name: b.kind for name, b in buffers.items()}
    )
    export_checkpoint(where, tmp_path / "out", ExportOptions(config=config_of(model, tmp_path / "config")))
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert loaded.state_dict()[name].dtype == tensor.dtype, name
    where = await save_model(memory_url(), SPEC, parameters(model))
    export_checkpoint(where, tmp_path / "without", ExportOptions(config=tmp_path / "base"))
    loaded = transformers.ResNetForImageClassification.from_pretrained(tmp_path / "without")
    assert all((buffer == buffer.new_zeros(())).all() for name, buffer in loaded.named_buffers() if "mean" in name)
    wrong = {**parameters(model), next(iter(trained)): np.zeros(9, np.float32)}
    with pytest.raises(CheckpointError, match=r"has shape \(9,\), the architecture's has \(4,\)"):
        await exported(tmp_path / "wrong", wrong, config_of(model, tmp_path / "config"))


@pytest.mark.parametrize("named", ["folder", "file"])
async def test_what_was_frozen_comes_from_the_base_model(tmp_path: Path, named: str) -> None:
    """Also a base in half precision; without its weights it is said what to name."""
    torch.manual_seed(1)
    model = llama()
    model.bfloat16().save_pretrained(tmp_path / "base")
    model.float().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    model.model.layers[1].requires_grad_(True)
    with torch.no_grad():
        for _, parameter in trainable(model):
            parameter.add_(0.125)
    where = await save_model(memory_url(), SPEC, parameters(model))
    config = tmp_path / "base" if named == "folder" else tmp_path / "base" / CONFIG
    export_checkpoint(where, tmp_path / "out", ExportOptions(config=config))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    alone = config_of(model, tmp_path / "alone")
    with pytest.raises(CheckpointError, match=r"if it was frozen, the folder of the base model with its safetensors"):
        export_checkpoint(where, tmp_path / "other", ExportOptions(config=alone))


async def test_an_untied_config_for_a_tied_model_is_explained(tmp_path: Path) -> None:
    model = gpt2(vocab_size=64)
    config = config_of(model, tmp_path / "config", tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match=r"lacks the tensor 'lm_head\.weight'.* tie_word_embeddings: true"):
        await exported(tmp_path, parameters(model), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt-17"}, "does not know model_type 'gpt-17'"),
        ({"architectures": ["GPT17LMHeadModel"]}, "does not know GPT17LMHeadModel"),
        ({"n_embd": "wide"}, "cannot build GPT2LMHeadModel from it"),
        ({"model_type": None}, "has no `model_type`"),
    ],
)
async def test_a_config_transformers_cannot_use_is_explained(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    model = gpt2(vocab_size=64)
    with pytest.raises(UsageError, match=message):
        await exported(tmp_path, parameters(model), config_of(model, tmp_path / "config", **changes))


async def test_without_transformers_nothing_is_compared_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(gpt2(vocab_size=64), tmp_path / "config")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with caplog.at_level(logging.WARNING):
        out = await exported(tmp_path, {"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)}, config)
    assert "transformers is not installed: names and shapes are not compared" in caplog.text
    assert set(load_file(out / WEIGHTS)) == {"a", "b", "c"}


# --- all or nothing ---------------------------------------------------------------------------------------------


async def test_a_folder_with_something_in_it_is_never_touched(tmp_path: Path) -> None:
    where = await save_model(tmp_path / "c", SPEC, {"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)})
    out = tmp_path / "out"
    out.mkdir()
    assert export_checkpoint(where, out, ExportOptions("safetensors")) == [WEIGHTS], "an empty one is as good as none"
    before = (out / WEIGHTS).stat().st_mtime_ns
    for taken in (out, out / WEIGHTS):
        with pytest.raises(UsageError, match="is there already and is not an empty folder"):
            export_checkpoint(where, taken, ExportOptions("safetensors"))
    assert (out / WEIGHTS).stat().st_mtime_ns == before


async def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = await save_model(tmp_path / "c", SPEC, {"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)})

    def full(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("anabranch.workers.export.write_tensors", full)
    with pytest.raises(OSError, match="disk full"):
        export_checkpoint(where, tmp_path / "out", ExportOptions("safetensors"))
    assert entries(tmp_path) == ["c"]


async def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    where = await save_model(tmp_path / "c", SPEC, {"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)})
    flip(where, "theta.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"theta\.safetensors is damaged"):
        export_checkpoint(where, tmp_path / "out", ExportOptions("safetensors"))


async def test_from_the_command_line(tmp_path: Path) -> None:
    where = await save_model(memory_url(), SPEC, {"a": np.ones(3), "b": np.ones(2), "c": np.ones(1)})
    done = CliRunner().invoke(app, ["export", where, str(tmp_path / "out"), "--format", "safetensors"])
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'out'}: {WEIGHTS}\n"
    done = CliRunner().invoke(app, ["export", where, str(tmp_path / "x"), "--format", "safetensors", "--config", "."])
    assert isinstance(done.exception, UsageError)
