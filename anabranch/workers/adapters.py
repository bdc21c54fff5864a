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
_LORA = re.compile(re.escape(_PREFIX) + r"(?P<module>.+)\.lora_(?P<side>[AB])\.(?P<adapter>[^.]+)\.weight")


def is_adapter(tensors: Mapping[str, Float32]) -> bool:
    """Whether these are what a PEFT model trains, and not a whole model."""
    return any(_LORA.fullmatch(name) for name in tensors)


def adapter_of(
    tensors: Mapping[str, Float32], task: Mapping[str, Any], config: Path | None
) -> tuple[dict[str, Float32], dict[str, Any]]:
    """Tensors and config of a folder for PEFT's `from_pretrained`. Rank and modules are told by the tensors;
    scale and base model by `config` (an adapter_config.json, a folder with one, or the base model's folder), else by
    the options of the task `hf`.

    `CheckpointError` for tensors that are no plain LoRA, `UsageError` if nothing tells the scale.
    """
    found = {name: _LORA.fullmatch(name) for name in tensors}
    matches = {name: match for name, match in found.items() if match is not None}
    if others := sorted(found.keys() - matches.keys()):
        raise CheckpointError(
            f"{others[0]!r} (one of {len(others)}) is no weight of a LoRA adapter, so this is no plain one: use "
            "--format safetensors, and load it with PEFT's set_peft_model_state_dict"
        )
    if len(adapters := sorted({match["adapter"] for match in matches.values()})) > 1:
        raise CheckpointError(f"several adapters ({', '.join(adapters)}) are no one folder: use --format safetensors")
    ranks = {tensors[name].shape[0] for name, match in matches.items() if match["side"] == "A"}
    if len(ranks) != 1:
        raise CheckpointError(f"adapters of several ranks, {sorted(ranks)}: use --format safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": ranks.pop(),
        "target_modules": sorted({match["module"] for match in matches.values()}),
        "bias": "none",
        "inference_mode": True,
        **_scale_and_base(task, config),
    }
    renamed = {name.replace(f".{adapters[0]}.weight", ".weight"): tensors[name] for name in matches}
    return renamed, described


def _scale_and_base(task: Mapping[str, Any], config: Path | None) -> dict[str, Any]:
    options = task.get("options", {})
    told: dict[str, Any] = {}
    if config is not None:
        path = config / ADAPTER_CONFIG if config.is_dir() else config
        if path.name == ADAPTER_CONFIG and path.is_file():
            told = _read(path)
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
    kept = ("lora_alpha", "use_rslora", "fan_in_fan_out", "task_type")
    return {**{key: told[key] for key in kept if key in told}, "base_model_name_or_path": base}


def _read(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--config {path}: cannot be read: {error}") from None
    return read
