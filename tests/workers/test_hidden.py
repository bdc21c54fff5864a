"""Which parameters are hidden matrices, in models as small as they can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from anabranch.errors import UsageError
from anabranch.workers.hidden import divide
from anabranch.workers.tasks.gpt import GPTTask


def hidden(model: nn.Module) -> set[str]:
    """Names of the hidden matrices; everything that is trained is in one of the two parts, once."""
    names = {id(p): name for name, p in model.named_parameters()}
    matrices, others = divide(model)
    found = [names[id(p)] for p in (*matrices, *others)]
    assert sorted(found) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    return {names[id(p)] for p in matrices}


class Layers(nn.Module):
    """Named modules, that are never called."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def test_layers_weights_are_hidden_and_nothing_else_is() -> None:
    model = Layers(
        linear=nn.Linear(4, 3), conv=nn.Conv2d(2, 3, 3), up=nn.ConvTranspose1d(2, 3, 3), norm=nn.LayerNorm(4),
        table=nn.Embedding(9, 4), bag=nn.EmbeddingBag(9, 4), memory=nn.LSTM(4, 4), frozen=nn.Linear(4, 4),
        computed=nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    )  # fmt: skip
    model.register_parameter("positions", nn.Parameter(torch.zeros(7, 4)))
    model.get_submodule("frozen").requires_grad_(False)
    assert hidden(model) == {"linear.weight", "conv.weight", "up.weight"}


@pytest.mark.parametrize("name", ["head", "lm_head", "score"])
def test_a_head_is_known_by_its_name(name: str) -> None:
    inside: Mapping[str, nn.Module] = {"a": nn.Linear(4, 4), name: nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))}
    assert hidden(Layers(whole=Layers(**inside))) == {"whole.a.weight"}


def test_without_a_name_the_last_layer_of_an_embeddings_size_is_the_head() -> None:
    """As wide as the vocabulary are other layers, too."""
    model = Layers(table=nn.Embedding(8, 4), up=nn.Linear(4, 8), down=nn.Linear(8, 4), out=nn.Linear(4, 8))
    assert hidden(model) == {"up.weight", "down.weight"}
    assert hidden(Layers(up=nn.Linear(4, 8), out=nn.Linear(8, 1))) == {"up.weight", "out.weight"}, "no embedding"


@pytest.mark.parametrize("how", ["one parameter", "one storage"])
def test_what_shares_memory_with_an_embedding_is_none(how: str) -> None:
    model = Layers(table=nn.Embedding(8, 4), a=nn.Linear(4, 8), out=nn.Linear(4, 8))
    table: Any = model.get_parameter("table.weight")
    tied = table if how == "one parameter" else nn.Parameter(table.detach()[:])
    model.get_submodule("out").register_parameter("weight", tied)
    assert hidden(model) == {"a.weight"}


def test_neighbours_in_one_storage_do_not_share_memory() -> None:
    flat = torch.zeros(48)
    model = Layers(table=nn.Embedding(8, 4), a=nn.Linear(4, 4))
    model.get_submodule("table").register_parameter("weight", nn.Parameter(flat[:32].view(8, 4)))
    model.get_submodule("a").register_parameter("weight", nn.Parameter(flat[32:].view(4, 4)))
    assert hidden(model) == {"a.weight"}


def test_of_the_built_in_model_only_the_blocks_matrices_are_hidden() -> None:
    model = GPTTask({"width": 256, "layers": 1}).build_model()  # as wide as its vocabulary
    expected = {f"blocks.0.{name}.weight" for name in ("qkv", "attention_out", "mlp_up", "mlp_down")}
    assert hidden(model) == expected
    compiled: Any = torch.compile(model, backend="eager")
    assert {id(p) for p in divide(compiled)[0]} == {id(p) for p in divide(model)[0]}


@pytest.mark.parametrize("tied", [False, True])
def test_of_a_hugging_face_model_the_output_embeddings_are_none(tied: bool) -> None:
    settings: dict[str, Any] = {"vocab_size": 32, "tie_word_embeddings": tied}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, **settings))
    assert hidden(gpt2) == {
        f"transformer.h.0.{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **settings))
    names = {name.split(".")[-2] for name in hidden(llama)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
def test_adapters_are_hidden_but_for_those_of_the_head() -> None:
    import peft

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))
    targets = ["q_proj", "lm_head", "embed_tokens"]
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets))
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert hidden(adapted) == {f"{layer}.lora_{part}.default.weight" for part in "AB"}


def test_a_model_of_which_nothing_is_trained_is_refused() -> None:
    with pytest.raises(UsageError, match="no parameter with requires_grad=True"):
        divide(nn.Linear(2, 2).requires_grad_(False))
