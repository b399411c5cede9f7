"""The oracle: a Mixture-of-Experts layer in plain fp64, one expert after another.

It shares no code with the library. Every function is differentiable by autograd in its float arguments, works for
zero tokens, and keeps the dtype of its input (pass float64). Shapes: T tokens, H hidden size, E experts, F expert
width, G = 2 for gated units (row 0 is the gate, row 1 is up), else 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

ScoreFunction = Literal["softmax", "sigmoid", "sqrtsoftplus"]
Activation = Callable[[Tensor], Tensor]


def largest(scores: Tensor, topk: int) -> Tensor:
    """Return a [T, E] bool map of each token's topk largest scores; of equal scores the lower index is first."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for t in range(scores.shape[0]):
        order = sorted(range(scores.shape[1]), key=lambda e, t=t: (-scores[t, e].item(), e))
        chosen[t, order[:topk]] = True
    return chosen


def scores_of(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return each expert's score for [T, E] logits: a softmax over the row, or a function of the logit alone."""
    if score_function == "softmax":
        return torch.softmax(logits, dim=-1)
    if score_function == "sigmoid":
        return torch.sigmoid(logits)
    return torch.sqrt(torch.logaddexp(logits, torch.zeros_like(logits)))


def log_scores(logits: Tensor, score_function: ScoreFunction) -> Tensor:
    """Return log(score) of [T, E] logits up to a constant of the row, exact where every score is tiny."""
    if score_function == "softmax":
        return logits
    if score_function == "sigmoid":
        return F.logsigmoid(logits)
    softplus = torch.logaddexp(logits, torch.zeros_like(logits))
    # log(log(1 + e^x)) is x for very negative x
    return 0.5 * torch.where(logits < -30, logits, softplus.clamp(min=1e-300).log())


def open_to_groups(scores: Tensor, num_groups: int, group_topk: int, num_summed: int) -> Tensor:
    """Return [T, E] bool: the experts in each token's group_topk best groups, by the sum of num_summed best scores."""
    num_tokens, num_experts = scores.shape
    size = num_experts // num_groups
    is_open = torch.zeros_like(scores, dtype=torch.bool)
    for t in range(num_tokens):
        sums = []
        for g in range(num_groups):
            members = sorted(scores[t, g * size : (g + 1) * size].tolist(), reverse=True)
            sums.append(sum(members[:num_summed]))
        for g in sorted(range(num_groups), key=lambda g, sums=sums: -sums[g])[:group_topk]:
            is_open[t, g * size : (g + 1) * size] = True
    return is_open


def routing(
    logits: Tensor,
    topk: int,
    *,
    score_function: ScoreFunction = "softmax",
    pre_softmax: bool = False,
    expert_bias: Tensor | None = None,
    scaling_factor: float | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose topk experts for each token from its logits.

    Args:
        logits: [T, E].
        score_function: "softmax" over the chosen logits, or "sigmoid" or "sqrtsoftplus" scores divided by their sum
            over the chosen (left as they are for topk 1).
        pre_softmax: True takes the softmax over all E experts and does not renormalise it over the chosen.
        expert_bias: [E], added to the scores for the choice alone; not for softmax.
        scaling_factor: multiplies the probs.
        num_groups, group_topk: the choice is among the group_topk best of num_groups groups of neighbours.
        group_score_topk: how many of a group's best scores make its score; topk // group_topk by default.

    Returns:
        probs [T, E], zero where not routed; routing_map [T, E], True where routed.
    """
    is_post_softmax = score_function == "softmax" and not pre_softmax
    ranking = logits if is_post_softmax else scores_of(logits, score_function)
    ranking = ranking.detach() if expert_bias is None else ranking.detach() + expert_bias
    if group_topk is not None:
        num_summed = group_score_topk or topk // group_topk
        ranking = ranking.masked_fill(~open_to_groups(ranking, num_groups, group_topk, num_summed), -torch.inf)
    elif expert_bias is None:
        ranking = logits.detach()  # the same order, without ties of saturated scores
    routing_map = largest(ranking, topk)
    return weights_on_map(logits, routing_map, topk, score_function, pre_softmax, scaling_factor), routing_map


def weights_on_map(
    logits: Tensor,
    routing_map: Tensor,
    topk: int,
    score_function: ScoreFunction = "softmax",
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
) -> Tensor:
    """Return probs [T, E] of a choice [T, E] that is already made; options as in `routing`."""
    if pre_softmax or topk == 1:
        probs = scores_of(logits, score_function) * routing_map
    else:
        # s_e / sum s over the chosen, as a softmax of log s
        logs = log_scores(logits, score_function).masked_fill(~routing_map, -torch.inf)
        probs = torch.softmax(logs, dim=-1)
    return probs * (1.0 if scaling_factor is None else scaling_factor)


def router(
    hidden: Tensor, weight: Tensor, topk: int, *, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Route hidden [T, H] by weight [E, H] and bias [E]; returns and further options as in `routing`."""
    logits = hidden @ weight.T  # [T, H] -> [T, E]
    return routing(logits if bias is None else logits + bias, topk, **options)


def aux_loss(logits: Tensor, topk: int, coeff: float, score_function: ScoreFunction = "softmax") -> Tensor:
    """Return the Switch load-balancing loss of logits [T, E]: coeff * E * sum_e counts_e / (T topk) * mean_t score_te.

    Scores are a distribution over all E experts: the softmax, or the scores divided by their sum. Counts are the
    topk of those scores, whatever biases and limits the routing itself applies.

    Source: Switch Transformers, arXiv:2101.03961, equations 4-6; counts divided by topk.
    """
    num_tokens, num_experts = logits.shape
    scores = torch.softmax(log_scores(logits, score_function), dim=-1)
    counts = largest(scores, topk).sum(dim=0).to(scores.dtype)
    loss = scores.new_zeros(())
    for e in range(num_experts):
        fraction = counts[e] / max(num_tokens * topk, 1)
        loss = loss + fraction * (scores[:, e].sum() / max(num_tokens, 1))
    return coeff * num_experts * loss


def z_loss(logits: Tensor, coeff: float) -> Tensor:
    """Return coeff * mean_t logsumexp(logits_t)^2 for logits [T, E].

    Source: ST-MoE, arXiv:2202.08906, equation 5.
    """
    return coeff * (torch.logsumexp(logits, dim=-1) ** 2).sum() / max(logits.shape[0], 1)


def activation(
    name: Literal["silu", "gelu", "quick_gelu", "squared_relu"],
    fc1: Tensor,
    *,
    alpha: float = 1.702,
    clamp: float | None = None,
    offset: float = 0.0,
) -> Tensor:
    """Apply an expert's activation to the first projection: [..., G, F] -> [..., F].

    Args:
        name: the function; "gelu" is the erf form, "quick_gelu" is x * sigmoid(alpha x).
        fc1: [..., 1, F] gives f(fc1); [..., 2, F] gives f(gate) * (up + offset).
        clamp: gated units only: gate from above, up from both sides.

    Gpt-oss is "quick_gelu", gated, with clamp 7 and offset 1.
    """
    functions: dict[str, Activation] = {
        "silu": lambda x: x * torch.sigmoid(x),
        "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "quick_gelu": lambda x: x * torch.sigmoid(alpha * x),
        "squared_relu": lambda x: torch.where(x > 0, x, torch.zeros_like(x)) ** 2,
    }
    if fc1.shape[-2] == 1:
        if clamp is not None or offset != 0.0:
            raise ValueError(f"clamp ({clamp}) and offset ({offset}) need a gated unit (G = 2), but G is 1.")
        return functions[name](fc1[..., 0, :])
    gate, up = fc1[..., 0, :], fc1[..., 1, :]
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return functions[name](gate) * (up + offset)


def experts(
    hidden: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    act: Activation,
    fc1_bias: Tensor | None = None,
    fc2_bias: Tensor | None = None,
) -> Tensor:
    """Return out_t = sum_e p_te * (W2_e act(W1_e x_t + b1_e) + b2_e), over the experts e that token t is routed to.

    Args:
        hidden: [T, H].
        probs: [T, E].
        routing_map: [T, E] bool, True where routed.
        fc1: [E, G, F, H].
        fc2: [E, H, F].
        act: [n, G, F] -> [n, F], for example `functools.partial(activation, "silu")`.
        fc1_bias: [E, G, F].
        fc2_bias: [E, H].

    Returns:
        [T, H].
    """
    output = hidden * 0
    for e in range(fc1.shape[0]):
        rows = routing_map[:, e].nonzero().flatten()  # [n]
        projected = torch.einsum("nh,gfh->ngf", hidden[rows], fc1[e])
        if fc1_bias is not None:
            projected = projected + fc1_bias[e]
        expert_output = act(projected) @ fc2[e].T  # [n, F] -> [n, H]
        if fc2_bias is not None:
            expert_output = expert_output + fc2_bias[e]
        output = output.index_add(0, rows, probs[rows, e].unsqueeze(-1) * expert_output)
    return output


def shared_expert(hidden: Tensor, fc1: Tensor, fc2: Tensor, act: Activation, gate: Tensor | None = None) -> Tensor:
    """Apply one MLP to every token: hidden [T, H], fc1 [G, F, H], fc2 [H, F], gate [1, H] -> [T, H].

    With a gate the output of token t is multiplied by sigmoid(gate . x_t).
    """
    output = act(torch.einsum("th,gfh->tgf", hidden, fc1)) @ fc2.T
    return output if gate is None else output * torch.sigmoid(hidden @ gate.T)


@dataclass(frozen=True, kw_only=True)
class MoEWeights:
    """The parameters of one layer; what is None is not there."""

    router: Tensor  # [E, H]
    fc1: Tensor  # [E, G, F, H]
    fc2: Tensor  # [E, H, F]
    router_bias: Tensor | None = None  # [E], added to the logits
    expert_bias: Tensor | None = None  # [E], for the choice alone
    fc1_bias: Tensor | None = None  # [E, G, F]
    fc2_bias: Tensor | None = None  # [E, H]
    shared_fc1: Tensor | None = None  # [G, F', H]
    shared_fc2: Tensor | None = None  # [H, F']
    shared_gate: Tensor | None = None  # [1, H]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by field name."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def moe_layer(
    hidden: Tensor,
    weights: MoEWeights,
    topk: int,
    act: Activation,
    *,
    score_function: ScoreFunction = "softmax",
    pre_softmax: bool = False,
    scaling_factor: float | None = None,
) -> Tensor:
    """Return the output [T, H] of the layer for hidden [T, H]: route, run the experts, add the shared expert.

    Options as in `routing`; `act` as in `experts`, for the shared expert as well.
    """
    probs, routing_map = router(
        hidden,
        weights.router,
        topk,
        score_function=score_function,
        pre_softmax=pre_softmax,
        bias=weights.router_bias,
        expert_bias=weights.expert_bias,
        scaling_factor=scaling_factor,
    )
    output = experts(
        hidden, probs, routing_map, weights.fc1, weights.fc2, act, fc1_bias=weights.fc1_bias, fc2_bias=weights.fc2_bias
    )
    if weights.shared_fc1 is not None and weights.shared_fc2 is not None:
        output = output + shared_expert(hidden, weights.shared_fc1, weights.shared_fc2, act, gate=weights.shared_gate)
    return output


def random_weights(
    num_experts: int,
    hidden_size: int,
    ffn_size: int,
    *,
    seed: int,
    gate_rows: Literal[1, 2] = 2,
    biases: bool = False,
    shared_ffn_size: int | None = None,
) -> MoEWeights:
    """Return seeded fp64 weights that require gradients, scaled so that activations keep the scale of their input.

    Args:
        gate_rows: G, 2 for gated units.
        biases: True adds the biases of the router and of the experts.
        shared_ffn_size: width of a shared expert with a gate; None for none.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return values.requires_grad_()

    wide, narrow = hidden_size**-0.5, ffn_size**-0.5
    tensors = {
        "router": draw(num_experts, hidden_size, scale=wide),
        "fc1": draw(num_experts, gate_rows, ffn_size, hidden_size, scale=wide),
        "fc2": draw(num_experts, hidden_size, ffn_size, scale=narrow),
    }
    if biases:
        tensors["router_bias"] = draw(num_experts, scale=0.1)
        tensors["fc1_bias"] = draw(num_experts, gate_rows, ffn_size, scale=0.1)
        tensors["fc2_bias"] = draw(num_experts, hidden_size, scale=0.1)
    if shared_ffn_size is not None:
        tensors["shared_fc1"] = draw(gate_rows, shared_ffn_size, hidden_size, scale=wide)
        tensors["shared_fc2"] = draw(hidden_size, shared_ffn_size, scale=shared_ffn_size**-0.5)
        tensors["shared_gate"] = draw(1, hidden_size, scale=wide)
    return MoEWeights(**tensors)
