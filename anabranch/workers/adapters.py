"""LoRA adapters as the PEFT library keeps them: what `anabranch export` writes for a run that trained only those."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anabranch.errors import CheckpointError, UsageError
from anabranch.model import Float32

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # what PEFT's wrapper adds to every name
_LORA = re.compile(
    re.escape(_PREFIX) + r"(?P<module>.+)\.(?:lora_(?P<part>A|B|magnitude_vector)\.(?P<adapter>[^.]+)\.weight"
    r"|lora_(?P<embedding>embedding_[AB])\.(?P<adapter_of_embedding>[^.]+)"
    r"|modules_to_save\.(?P<adapter_of_whole>[^.]+)\.(?P<whole>.+))"
)
_INITS = (True, False, "gaussian", "eva", "orthogonal")  # of `init_lora_weights`: those that leave the base as it is


def is_adapter(tensors: Mapping[str, Float32]) -> bool:
    """Whether these are what a PEFT model trains, and not a whole model."""
    return any(_LORA.fullmatch(name) for name in tensors)


def check_adapters(model: Any) -> None:
    """`UsageError` for a PEFT model whose frozen weights are not those of the base model it was made from: other
    members would have others, and the adapters mean nothing on the original."""
    configs = getattr(model, "peft_config", None)
    for name, config in configs.items() if isinstance(configs, dict) else ():
        if (init := _changes_base(getattr(config, "init_lora_weights", True))) is not None:
            raise UsageError(
                f"adapter {name!r} has init_lora_weights = {init!r}, which may leave every member with other frozen "
                f"weights. Allowed: {', '.join(map(repr, _INITS))}; or save the base as it changed, and give every "
                "member that folder with a plain adapter"
            )


def _changes_base(init: Any) -> Any | None:
    return None if any(init is plain or init == plain for plain in _INITS) else init


def adapter_of(
    tensors: Mapping[str, Float32], task: Mapping[str, Any], config: Path | None
) -> tuple[dict[str, Float32], dict[str, Any]]:
    """Tensors and config of a folder for PEFT's `from_pretrained`.

    `config`: an adapter_config.json or a folder with one, of which everything is kept that decides what the adapters
    do (scale, patterns, rsLoRA, DoRA …); or the base model's folder. Without the first, rank and modules are told by
    the tensors, the scale by the options of the task `hf`.

    `CheckpointError` for tensors that are no plain LoRA, or not what the config describes; `UsageError` if nothing
    tells the scale.
    """
    found = {name: _LORA.fullmatch(name) for name in tensors}
    matches = {name: match.groupdict() for name, match in found.items() if match is not None}
    for match in matches.values():
        match["adapter"] = match["adapter"] or match["adapter_of_embedding"] or match["adapter_of_whole"]
    if others := sorted(found.keys() - matches.keys()):
        raise CheckpointError(
            f"{others[0]!r} (one of {len(others)}) is no weight of a LoRA adapter, so this is no plain one: use "
            "--format safetensors, and load it with PEFT's set_peft_model_state_dict"
        )
    if len(adapters := sorted({match["adapter"] for match in matches.values()})) > 1:
        raise CheckpointError(f"several adapters ({', '.join(adapters)}) are no one folder: use --format safetensors")
    first, second = ("A", "embedding_A"), ("B", "embedding_B")
    part_of = {name: match["part"] or match["embedding"] for name, match in matches.items()}
    ranks = {match["module"]: tensors[name].shape[0] for name, match in matches.items() if part_of[name] in first}
    halves = {match["module"] for name, match in matches.items() if part_of[name] in second}
    if odd := sorted(halves ^ ranks.keys()):
        raise CheckpointError(
            f"of the adapters of {odd[0]} (one of {len(odd)}) only one half was trained, and the frozen half is in "
            "no checkpoint: use --format safetensors"
        )
    dora = "magnitude_vector" in part_of.values()
    told = _told(config)
    plain = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": sorted(ranks),
        "bias": "none",
        **_scale_and_base(task, config, told),
        "inference_mode": True,
    }
    described = {"r": max(ranks.values(), default=0), **plain, **({"use_dora": True} if dora else {})}
    described["init_lora_weights"] = True  # of new ones; these are given
    whole = {match["module"] for match in matches.values() if match["whole"]}
    _describe_whole(described, whole)
    _check_described(ranks, described, told, dora=dora)
    renamed = {}
    for name, match in matches.items():
        plain_name = match["whole"] or f"lora_{part_of[name]}" + (".weight" if match["part"] in ("A", "B") else "")
        renamed[f"{_PREFIX}{match['module']}.{plain_name}"] = tensors[name]
    return renamed, described


def _describe_whole(described: dict[str, Any], modules: set[str]) -> None:
    """Modules that were trained as a whole (`modules_to_save`) must be named, or PEFT leaves them out."""
    named = list(described.get("modules_to_save") or ())
    for module in sorted(modules):
        if not any(module == name or module.endswith(f".{name}") for name in named):
            named.append(module.rpartition(".")[2])
    if named:
        described["modules_to_save"] = named


def _told(config: Path | None) -> dict[str, Any]:
    """PEFT's own description of the adapters; empty if `config` names none."""
    path = config / ADAPTER_CONFIG if config is not None and config.is_dir() else config
    return _read(path) if path is not None and path.name == ADAPTER_CONFIG and path.is_file() else {}


def _check_described(
    ranks: Mapping[str, int], described: Mapping[str, Any], told: Mapping[str, Any], *, dora: bool
) -> None:
    """`CheckpointError` unless the config is that of these tensors."""
    if (kind := described["peft_type"]) != "LORA":
        raise CheckpointError(f"{ADAPTER_CONFIG}: peft_type is {kind!r}, the checkpoint has LoRA adapters")
    if (init := _changes_base(told.get("init_lora_weights", True))) is not None:
        raise CheckpointError(
            f"{ADAPTER_CONFIG}: init_lora_weights = {init!r} changed the base model, so these adapters mean nothing "
            "on the original one: use --format safetensors, beside the base as it was trained on"
        )
    if told and dora != bool(told.get("use_dora", False)):
        raise CheckpointError(
            f"{ADAPTER_CONFIG}: use_dora is {told.get('use_dora', False)}, the checkpoint has "
            f"{'' if dora else 'no '}magnitude vectors: name the config of the adapters that were trained"
        )
    for module, rank in sorted(ranks.items()):
        if (wanted := _by_pattern(described.get("rank_pattern") or {}, module, described["r"])) != rank:
            raise CheckpointError(
                f"{module} has adapters of rank {rank}, the config says {wanted} (r and rank_pattern): name the "
                f"{ADAPTER_CONFIG} of the adapters that were trained with --config, or use --format safetensors"
            )


def _by_pattern(patterns: Mapping[str, int], module: str, otherwise: int) -> int:
    """As PEFT looks a module up: the first pattern that is the end of its name."""
    return next((n for key, n in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _scale_and_base(task: Mapping[str, Any], config: Path | None, told: Mapping[str, Any]) -> dict[str, Any]:
    options = task.get("options", {})
    base = told.get("base_model_name_or_path") or options.get("model")
    if config is not None and not told:
        base = str(config if config.is_dir() else config.parent)
    if not told and task.get("name") == "hf":
        told = {"lora_alpha": options.get("lora_alpha", 16)}
    if "lora_alpha" not in told:
        raise UsageError(
            "this run trained LoRA adapters, and nothing says how they are scaled (lora_alpha): name the "
            f"{ADAPTER_CONFIG} that PEFT's save_pretrained wrote with --config, or use --format safetensors"
        )
    return {**told, "base_model_name_or_path": base}


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path}: cannot be read: {error}") from None
    return read
