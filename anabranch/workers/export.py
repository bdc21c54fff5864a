"""`anabranch export`: a checkpoint's model as a folder that others load, such as `from_pretrained` of transformers.

A checkpoint's tensors already have the model's own names, so exporting is choosing which to write, in shards, and
putting a config beside them. With transformers installed, names and shapes are compared with the architecture that
the config names before anything is written.

Where a run trained only LoRA adapters, what comes out is a folder for PEFT (`workers/adapters.py`).
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from anabranch.checkpoints.reading import Restored, read_checkpoint
from anabranch.checkpoints.tensors import write_tensors
from anabranch.errors import CheckpointError, UsageError
from anabranch.model import unflatten
from anabranch.workers.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_of, is_adapter

log = logging.getLogger("anabranch.export")

Format = Literal["hf", "safetensors"]
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
BESIDE_CONFIG = (  # what `save_pretrained` of a model, tokenizer or processor writes beside config.json
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip

Tensors = dict[str, NDArray[Any]]  # float32, and int64 where something is counted


@dataclass(frozen=True)
class ExportOptions:
    """`config`: a config.json or a folder that has one; None: the folder of the run's `task.options.model`."""

    format: Format = "hf"
    config: Path | None = None
    max_shard_mb: int = 5000  # 10⁶ bytes, as transformers counts


def export_checkpoint(where: str | Path, out: Path, options: ExportOptions | None = None) -> list[str]:
    """Export the checkpoint (or a run directory's newest one) to the new folder `out`; the names of its files.

    `out` appears complete or not at all. UsageError for what cannot be asked for, CheckpointError for a checkpoint
    that is damaged or of another architecture; both before anything is written.
    """
    options = options or ExportOptions()
    if options.format == "safetensors" and options.config is not None:
        raise UsageError("--config belongs to --format hf; --format safetensors writes tensors only")
    _check_empty(out)
    restored = read_checkpoint(where, momenta=False)
    tensors: Tensors = dict(unflatten(restored.layout, restored.thetas))
    for tensor in restored.layout.tensors:
        if tensor.kind == "counter":
            tensors[tensor.name] = tensors[tensor.name].astype(np.int64)
    config, folder = None, None
    if options.format == "hf" and is_adapter(tensors):
        weights, described = adapter_of(tensors, restored.manifest["spec"].get("task", {}), options.config)
        with _appearing(out) as temporary:
            _write_shard(temporary / ADAPTER_WEIGHTS, weights)
            _write_json(temporary / ADAPTER_CONFIG, described)
        return sorted(path.name for path in out.iterdir())
    if options.format == "hf":
        source = options.config or _model_of_run(restored)
        config, folder = _read_config(source)
        tensors = _fitting(tensors, config, restored.location, source)
    with _appearing(out) as temporary:
        _write_shards(temporary, tensors, options.max_shard_mb * 1_000_000)
        if config is not None:
            _write_json(temporary / CONFIG, _described(config))
        for name in BESIDE_CONFIG:
            if folder is not None and (folder / name).is_file():
                shutil.copyfile(folder / name, temporary / name)
    return sorted(path.name for path in out.iterdir())


# --- config ---------------------------------------------------------------------------------------------------


def _model_of_run(restored: Restored) -> Path:
    """The model's folder as the run's task names it."""
    task = restored.manifest["spec"].get("task", {})
    named = task.get("options", {}).get("model")
    if isinstance(named, str) and (Path(named) / CONFIG).is_file():
        return Path(named)
    otherwise = "or use --format safetensors, which needs none"
    if named is not None:
        raise UsageError(
            f"task.options.model = {named!r} is no folder with a {CONFIG} on this machine; name one with --config, "
            f"{otherwise}"
        )
    if task.get("name") == "gpt":
        raise UsageError(
            f"{restored.location} holds the built-in byte-level GPT, which is no transformers architecture: "
            "use --format safetensors"
        )
    raise UsageError(
        f"{restored.location} does not say which architecture its model has (task.options.model); name its {CONFIG} "
        f"with --config, {otherwise}"
    )


def _read_config(source: Path) -> tuple[dict[str, Any], Path | None]:
    """The config, and the folder it is in if a folder was named."""
    folder = source if source.is_dir() else None
    path = source / CONFIG if folder is not None else source
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {source}: {path.name} cannot be read: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UsageError(f"--config {source}: {path.name} has no `model_type`; it is not one of a transformers model")
    return config, folder


def _described(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the dtype that is written, as `save_pretrained` does: loading must not round."""
    described = {key: value for key, value in config.items() if key != "torch_dtype"}
    return {**described, "torch_dtype" if "torch_dtype" in config else "dtype": "float32"}


# --- the architecture -----------------------------------------------------------------------------------------


def _fitting(tensors: Tensors, config: Mapping[str, Any], location: str, source: Path) -> Tensors:
    """`tensors` without the second copies of tied ones, compared with the architecture if transformers is there.

    What the run did not train (frozen layers, buffers) comes from the weights beside the config, if there are any.
    """
    groups, buffers = _architecture(config)
    if groups is None:
        log.warning("transformers is not installed: names and shapes are not compared with the architecture")
        return tensors
    known = {name for names, _ in groups for name in names} | buffers.keys()
    if unexpected := [name for name in tensors if name not in known]:
        raise CheckpointError(
            f"{location} has the tensor {unexpected[0]!r} (one of {len(unexpected)}), which {_named(config)} does "
            "not have; --config must describe the model that was trained"
        )
    for name in buffers.keys() & tensors.keys():
        _check_shape(name, buffers[name], tensors, location)
    tensors = _completed(tensors, [names for names, shape in groups if 0 not in shape], list(buffers), source)
    dropped = set[str]()
    for names, shape in groups:
        if 0 in shape:  # nothing of it was trained, and loading it needs nothing
            continue
        dropped |= _check_group([name for name in names if name in tensors], names, shape, tensors, location)
    return {name: array for name, array in tensors.items() if name not in dropped}


def _check_group(
    present: list[str], names: list[str], shape: tuple[int, ...], tensors: Tensors, location: str
) -> set[str]:
    """One parameter of the architecture under all its names (several: tied); which of them not to write."""
    if not present:
        also = f" (tied with {', '.join(names[1:])})" if names[1:] else ""
        tied = "" if names[1:] else ", if it is tied to another, a config that says tie_word_embeddings: true"
        raise CheckpointError(
            f"{location} lacks the tensor {names[0]!r}{also} of the architecture; name with --config, if it was "
            f"frozen, the folder of the base model with its safetensors{tied}"
        )
    for name in present:
        _check_shape(name, shape, tensors, location)
        if not np.array_equal(tensors[name].view(np.uint32), tensors[present[0]].view(np.uint32)):
            raise CheckpointError(
                f"{location}: {present[0]} and {name} differ, but the config ties them: it must say "
                "tie_word_embeddings: false"
            )
    return set(present[1:])


def _check_shape(name: str, shape: tuple[int, ...], tensors: Tensors, location: str) -> None:
    if tensors[name].shape != shape:
        raise CheckpointError(f"{location}: {name} has shape {tensors[name].shape}, the architecture's has {shape}")


def _completed(tensors: Tensors, groups: list[list[str]], buffers: list[str], source: Path) -> Tensors:
    """With what the run lacks and the base model has, in float32 or int64."""
    lacking = {name for names in groups if not any(n in tensors for n in names) for name in names}
    wanted = lacking | {name for name in buffers if name not in tensors}
    folder = source if source.is_dir() else source.parent
    files = sorted(folder.glob("*.safetensors"))
    if not wanted or not files:
        return tensors
    from safetensors import safe_open

    found: Tensors = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                held = {name: file.get_tensor(name) for name in file.keys() if name in wanted}  # noqa: SIM118
                found |= {n: (t.float() if t.is_floating_point() else t.long()).numpy() for n, t in held.items()}
        except Exception as error:
            raise UsageError(f"--config {source}: {path.name} cannot be read: {error}") from None
    if found:
        log.info("%d tensors that the run did not train (%s …) are those of %s", len(found), min(found), folder)
    return {**tensors, **found}


def _architecture(
    config: Mapping[str, Any],
) -> tuple[list[tuple[list[str], tuple[int, ...]]] | None, dict[str, tuple[int, ...]]]:
    """Each parameter's names (several: tied; the one that is saved first) and shape; None without transformers. And
    the buffers with values that are saved, too."""
    try:
        import torch
        import transformers
    except ImportError:
        return None, {}
    version = f"transformers {transformers.__version__}"
    otherwise = "install a version that does, or use --format safetensors"
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        raise UsageError(f"{version} does not know model_type {config['model_type']!r}: {otherwise}")
    architecture = next(iter(config.get("architectures") or ()), None)
    kind = getattr(transformers, architecture or "AutoModelForCausalLM", None)
    if kind is None:
        raise UsageError(f"{version} does not know {architecture} (the config's `architectures`): {otherwise}")
    make = kind if architecture else kind.from_config
    try:
        with torch.device("meta"):  # shapes without memory
            model = make(transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)))
    except Exception as error:  # whatever a config can make of an architecture
        raise UsageError(f"--config: {version} cannot build {_named(config)} from it: {error}") from error
    groups: dict[int, tuple[list[str], tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), ([], tuple(parameter.shape)))[0].append(name)
    saved = model.state_dict().keys()
    return list(groups.values()), {n: tuple(b.shape) for n, b in model.named_buffers() if n in saved}


def _named(config: Mapping[str, Any]) -> str:
    return str(next(iter(config.get("architectures") or ()), config["model_type"]))


# --- writing --------------------------------------------------------------------------------------------------


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already and is not an empty folder; name a new one")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A temporary folder that becomes `out` at the end of the block, unless it fails."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_shards(folder: Path, tensors: Tensors, limit: int) -> None:
    """One file, or numbered ones of at most `limit` bytes (a larger tensor has one of its own) and their index."""
    shards = _split(tensors, limit)
    if len(shards) == 1:
        _write_shard(folder / WEIGHTS, tensors)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(folder / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(array.nbytes for array in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _split(tensors: Tensors, limit: int) -> list[Tensors]:
    shards: list[Tensors] = [{}]
    filled = 0
    for name, array in tensors.items():
        if shards[-1] and filled + array.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = array
        filled += array.nbytes
    return shards


def _write_shard(path: Path, tensors: Tensors) -> None:
    with path.open("wb") as file:
        write_tensors(file, tensors, {"format": "pt"})  # transformers insists on it
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: object) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
