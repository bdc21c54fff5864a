"""Which parameters of a model are hidden matrices: those that map one layer's features to the next one's.

Hidden are the weights of `nn.Linear`, of convolutions, and of transformers' `Conv1D` (GPT-2's linear layer), those of
adapters among them, unless they are

* an embedding: the weight of `nn.Embedding` or `nn.EmbeddingBag`, and whatever shares memory with it (tied heads);
* the output head: all parameters of what a Hugging Face model's `get_output_embeddings()` gives, and all below a
  module named `head`, `lm_head` or as `HEADS` has it. If there is neither, and no tied head, it is the last linear
  layer with as many outputs as an embedding has rows.

All else is none: biases, gains, position tables, recurrent weights, whatever is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn

from anabranch.workers.tensors import trainable, unwrapped

HEADS = frozenset({"head", "lm_head", "output_head", "embed_out", "unembed", "unembedding", "classifier", "score"})


def divide(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What is trained: (hidden matrices, all others), both in the model's order; each shared parameter once.

    Raises `UsageError` if nothing is trained, or if a parameter is sharded, complex or without values.
    """
    trained = [parameter for _, parameter in trainable(model)]
    inner = unwrapped(model)
    embeddings = [m.weight for m in inner.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = [weight for module in inner.modules() if (weight := _weight_of_layer(module)) is not None]
    tied = {id(weight) for weight in linear if any(_overlap(weight, table) for table in embeddings)}
    heads = {id(parameter) for module in _heads(inner) for parameter in module.parameters()}
    if not heads and not tied:
        heads = _by_size(inner)
    hidden = {id(weight) for weight in linear} - tied - heads - {id(table) for table in embeddings}
    return [p for p in trained if id(p) in hidden], [p for p in trained if id(p) not in hidden]


def _weight_of_layer(module: nn.Module) -> nn.Parameter | None:
    """Its matrix, if it is a layer with one; None too for a weight that is computed from others."""
    kind = type(module)
    transposed = kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")
    if transposed or isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        weight = module._parameters.get("weight")
        return weight if weight is not None and weight.ndim >= 2 else None
    return None


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in HEADS:
            yield module
        if callable(give := getattr(type(module), "get_output_embeddings", None)):
            with suppress(NotImplementedError):
                if isinstance(head := give(module), nn.Module):
                    yield head


def _by_size(model: nn.Module) -> set[int]:
    """The last linear layer that has an output for each row of an embedding: there may be others of that size."""
    rows = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    alike = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features in rows]
    return {id(parameter) for module in alike[-1:] for parameter in module.parameters()}


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they share memory: the same parameter, or views of one storage that meet."""
    if one is other:
        return True
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr() or not one.numel() or not other.numel():
        return False
    (begin, end), (start, stop) = _extent(one), _extent(other)
    return begin < stop and start < end


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte in its storage, and the one behind the last."""
    begin = int(tensor.storage_offset())
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.element_size(), (begin + int(last) + 1) * tensor.element_size()
