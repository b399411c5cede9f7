"""The Transformer Engine backend on Transformer Engine's own Python, without a recipe, beside the reference backend."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dispatchers.base import ExpertInput
from moe import GroupedMLP, MoEConfig, MoELayer
from tests.parity import transformer_engine
from tests.tolerances import assert_close

HIDDEN, FFN, EXPERTS = 48, 80, 4


@pytest.fixture(scope="module")
def modules() -> dict[str, types.ModuleType]:
    """The wheel's modules."""
    return transformer_engine.load()


@pytest.fixture(autouse=True)
def _on_a_gpu(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    """Put them where `moe.experts_te` imports them from."""
    sys.modules.pop("moe.experts_te", None)
    with transformer_engine.believing_in_a_gpu(modules):
        yield
    sys.modules.pop("moe.experts_te", None)


def build(backend: str, **fields: Any) -> GroupedMLP:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "moe_ffn_hidden_size": FFN, "num_moe_experts": EXPERTS, "init_method_std": 0.2}
    experts = GroupedMLP(MoEConfig(**sizes, moe_expert_backend=backend, **fields))
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return experts


def draw_input(load: tuple[int, ...], dtype: torch.dtype, multiple: int) -> ExpertInput:
    """Return rows that several slots read; probs do not sum to 1."""
    generator = torch.Generator().manual_seed(5)
    num_rows = max(*load, 3)
    ids = [torch.randperm(num_rows, generator=generator)[:count] for count in load]
    tokens = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    probs = (torch.rand(sum(load), generator=generator) + 0.25).requires_grad_()
    return ExpertInput.padded(tokens, torch.cat(ids), probs, torch.tensor(load), load, multiple)


def run(experts: GroupedMLP, expert_input: ExpertInput) -> dict[str, Tensor]:
    """Return the output and every gradient."""
    parameters = dict(experts.named_parameters())
    output = experts(expert_input)
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype)
    grads = torch.autograd.grad(output, [expert_input.tokens, expert_input.probs, *parameters.values()], weight)
    return {
        "output": output.detach(),
        "tokens": grads[0],
        "probs": grads[1],
        **dict(zip(parameters, grads[2:], strict=True)),
    }


@pytest.mark.parametrize("multiple", [1, 16])
@pytest.mark.parametrize("load", [(7, 0, 1, 50), (0, 0, 61, 0), (0, 0, 0, 0)], ids=str)
@pytest.mark.parametrize(("gated", "biases"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_reference_backend(
    dtype: torch.dtype, gated: bool, biases: bool, load: tuple[int, ...], multiple: int
) -> None:
    fields = {"params_dtype": dtype, "gated_linear_unit": gated, "add_bias_linear": biases, "activation_func": "gelu"}
    reference, ours = build("reference", **fields), build("te", **fields)
    assert "transformer_engine" in type(ours.backend.fc1).__module__
    assert ours.state_dict().keys() == reference.state_dict().keys()
    ours.load_state_dict(reference.state_dict())
    expert_input = draw_input(load, dtype, multiple)
    wanted, actual = run(reference, expert_input), run(ours, expert_input)
    for name, value in wanted.items():
        assert_close(actual[name], value, dtype, what=name)


def test_a_whole_layer_learns() -> None:
    torch.manual_seed(0)
    config = MoEConfig(hidden_size=HIDDEN, moe_ffn_hidden_size=FFN, num_moe_experts=EXPERTS, moe_expert_backend="te")
    layer = MoELayer(config)
    assert "by transformer_engine.pytorch.GroupedLinear" in layer.describe()
    x, target = torch.randn(2, 30, 1, HIDDEN)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
