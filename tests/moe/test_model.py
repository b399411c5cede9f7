"""MoEGPT: its loss by hand, independent sequences, causality, names and initial values."""

import math
from dataclasses import replace

import pytest
import torch

from moe.config import TransformerConfig
from moe.layer import MoELayer
from moe.model import MoEGPT
from moe.shared_experts import MLP
from tests.tolerances import assert_close

VOCAB, BATCH, SEQUENCE = 11, 3, 5
CONFIG = TransformerConfig(
    hidden_size=12,
    num_moe_experts=4,
    moe_ffn_hidden_size=7,
    num_layers=4,
    num_attention_heads=3,
    vocab_size=VOCAB,
    params_dtype=torch.float64,
    moe_router_dtype="fp64",
    moe_layer_freq=2,
    init_method_std=0.4,
)


def ids(seed: int = 1) -> torch.Tensor:
    return torch.randint(VOCAB, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    model, tokens, labels = MoEGPT(CONFIG), ids(1), ids(2)
    logits = model(tokens)
    assert logits.shape == (BATCH, SEQUENCE, VOCAB)
    losses = [
        math.log(sum(math.exp(x) for x in logits[b, s].tolist())) - logits[b, s, labels[b, s]].item()
        for b in range(BATCH)
        for s in range(SEQUENCE)
    ]
    assert_close(model(tokens, labels), torch.tensor(sum(losses) / len(losses), dtype=torch.float64))
    low = MoEGPT(replace(CONFIG, params_dtype=torch.bfloat16, moe_router_dtype="fp32"))
    assert low(tokens).dtype == torch.bfloat16
    assert low(tokens, labels).dtype == torch.float32
    assert_close(low(tokens, labels), low(tokens).double().log_softmax(-1).gather(2, labels[..., None]).mean().neg())


@pytest.mark.parametrize("padding", [False, True])
def test_a_sequence_does_not_depend_on_its_batch_mates(padding: bool) -> None:
    model, tokens = MoEGPT(replace(CONFIG, moe_router_padding_for_quantization=padding)), ids()
    logits, order = model(tokens), torch.tensor([2, 0, 1])
    assert_close(model(tokens[order]), logits[order])
    for b in range(BATCH):
        assert_close(model(tokens[b : b + 1]), logits[b : b + 1])


def test_logits_see_no_later_token() -> None:
    model, tokens = MoEGPT(CONFIG), ids()
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    assert_close(after[:, :3], before[:, :3])
    assert (before[:, 3:] - after[:, 3:]).abs().amax(-1).min() > 1e-6


@pytest.mark.parametrize(
    ("freq", "names"),
    [(1, [0, 1, 2, 3]), (2, [0, 2]), ((0, 0, 1, 1), [2, 3]), ((0, 0, 0, 0), [])],
)
def test_moe_layers_are_named_and_numbered(freq: int | tuple[int, ...], names: list[int]) -> None:
    model = MoEGPT(replace(CONFIG, moe_layer_freq=freq))
    found = model.moe_layers()
    assert list(found) == [f"layers.{index}.mlp" for index in names]
    assert [layer.layer_number for layer in found.values()] == [index + 1 for index in names]
    for index, block in enumerate(model.layers):
        assert type(block.mlp) is (MoELayer if index in names else MLP)


def test_initial_values() -> None:
    torch.manual_seed(0)
    model = MoEGPT(replace(CONFIG, hidden_size=96, vocab_size=256, init_method_std=0.02, add_bias_linear=True))
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            assert (parameter == 1).all(), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            std = 0.02 / math.sqrt(8) if "linear_proj" in name else 0.02
            assert abs(parameter.std().item() / std - 1) < 0.2, name


def test_every_parameter_learns() -> None:
    model = MoEGPT(CONFIG)
    model(ids(1), ids(2)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_a_model_built_on_the_meta_device_is_initialised_after_to_empty() -> None:
    config = replace(CONFIG, moe_shared_expert_intermediate_size=5, moe_shared_expert_gate=True)
    with torch.device("meta"):
        model = MoEGPT(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    unset = [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]
    assert unset == []
    assert model(ids(), ids(2)).isfinite()


@pytest.mark.parametrize("per_token", [False, True])
def test_padding_at_the_end_changes_nothing_for_the_rest(per_token: bool) -> None:
    config = replace(CONFIG, moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.1, calculate_per_token_loss=per_token)
    model, tokens, labels, lengths = MoEGPT(config), ids(1), ids(2), (5, 2, 3)
    padding = torch.arange(SEQUENCE) >= torch.tensor(lengths).unsqueeze(1)
    loss = model(tokens, labels, padding)
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    log_probs = model(tokens, padding_mask=padding).log_softmax(-1).gather(2, labels[..., None]).squeeze(-1)
    expected = -log_probs[~padding].sum() / (1 if per_token else sum(lengths))
    assert_close(loss, expected)
    for b, length in enumerate(lengths):  # the logits of a sequence are those of its valid tokens alone
        alone = model(tokens[b : b + 1, :length])
        assert_close(model(tokens, padding_mask=padding)[b, :length], alone[0])
    counts = [layer.router.tokens_per_expert.sum().item() for layer in model.moe_layers().values()]
    assert counts == [2 * sum(lengths)] * 2
    changed = tokens.masked_fill(padding, 0)
    model.zero_grad()
    assert_close(model(changed, labels, padding), loss)
    model(changed, labels, padding).backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert_close(parameter.grad, gradient)


def test_ignored_labels_have_no_loss() -> None:
    model, tokens, labels = MoEGPT(CONFIG), ids(1), ids(2)
    ignored = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(3)) < 0.4
    log_probs = model(tokens).log_softmax(-1).gather(2, labels[..., None]).squeeze(-1)
    assert_close(model(tokens, labels.masked_fill(ignored, -100)), -log_probs[~ignored].mean())
    assert model(tokens, torch.full_like(labels, -100)).item() == 0.0


def test_experts_that_choose_tokens_see_later_ones_and_the_model_says_so() -> None:
    with pytest.warns(UserWarning, match="the experts of a token depend on later tokens"):
        MoEGPT(replace(CONFIG, moe_router_type="expert_choice"))


def test_a_mask_of_another_shape_is_refused() -> None:
    model, tokens = MoEGPT(CONFIG), ids()
    with pytest.raises(ValueError, match=r"padding_mask \(\[5, 3\], torch.bool\) must be bool of the shape \[3, 5\]"):
        model(tokens, padding_mask=torch.zeros(SEQUENCE, BATCH, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"padding_mask \(\[3, 5\], torch.int64\) must be bool"):
        model.moe_layers()["layers.0.mlp"](torch.zeros(3, 5, 12, dtype=torch.float64), torch.zeros(3, 5).long())
