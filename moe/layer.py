"""MoELayer: the way of a token, one line a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dispatchers.base import ExpertInput
from moe.config import MoEConfig
from moe.dispatching import build_dispatcher
from moe.experts import GroupedMLP
from moe.gemm import gemm_dtype
from moe.parallel import ProcessGroups
from moe.shared_experts import SharedExpertMLP
from moe.zero_experts import ZeroComputationExperts
from router.collectives import deepcopy_sharing_groups
from router.expert_choice import ExpertChoiceRouter
from router.gating import no_autocast
from router.losses import on_backward
from router.padding import RoutingMapPadding
from router.router import TopKRouter, check_padding_mask, handle_of

ROUTERS = {"topk": TopKRouter, "expert_choice": ExpertChoiceRouter}


class MoELayer(nn.Module):
    """Router, routing-map padding, dispatcher, experts, dispatcher back, plus the shared expert.

    Every stage is a module that may be replaced, hooked or printed.

    Args:
        config: see MoEConfig.
        groups: what `ProcessGroups.build` returned; None on one process.
        layer_number: shown by `describe`, from 1; None if the layer stands alone.

    Attributes:
        router, routing_map_padding, token_dispatcher, experts: the stages.
        shared_experts: SharedExpertMLP, or None.
        zero_experts: ZeroComputationExperts, or None.
        fc1_latent_proj, fc2_latent_proj: into and out of moe_latent_size; identities without it.
        computed_slots: [] int64, slots that this rank's experts computed, padding included, since `collect_metrics`.
            It advances as the router's counters do.

    Raises:
        ValueError: sizes that the groups do not divide.
    """

    computed_slots: Tensor

    def __init__(self, config: MoEConfig, groups: ProcessGroups | None = None, layer_number: int | None = None) -> None:
        super().__init__()
        self.config, self.groups, self.layer_number = config, groups, layer_number
        self.router = ROUTERS[config.moe_router_type](config, groups)
        pads_map = config.moe_router_padding_for_quantization
        self.routing_map_padding = RoutingMapPadding(
            config.pad_multiple if pads_map else 1, fused=config.moe_permute_fusion
        )
        self.token_dispatcher = build_dispatcher(config, groups)
        self.experts = GroupedMLP(config, groups)
        has_shared = config.moe_shared_expert_intermediate_size is not None
        self.shared_experts = SharedExpertMLP(config, groups) if has_shared else None
        self.zero_experts = ZeroComputationExperts(config) if config.num_zero_experts else None
        self.fc1_latent_proj, self.fc2_latent_proj = _latent_projections(config)
        self.register_buffer("computed_slots", torch.zeros((), dtype=torch.int64), persistent=False)
        self.run = _recomputed if config.moe_layer_recompute else _directly
        self.handle = handle_of(self)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """Return the layer's output, without the residual.

        Args:
            hidden_states: [S, B, H] in the dtype of the parameters. Under TP or CP: this rank's slice of the sequence.
            padding_mask: [S, B] bool, True = padding: such tokens are routed nowhere, and their output is 0.
            cu_seqlens: [N + 1] int, offsets of N sequences packed into this rank's tokens (B = 1); for seq_aux_loss.

        Returns:
            [S, B, H] in the dtype of hidden_states.

        Raises:
            ValueError: a mask or offsets that do not fit.

        Collectives: those of the router and of the dispatcher. Host syncs: one, the dispatcher's.
        """
        if padding_mask is not None:
            check_padding_mask(padding_mask, hidden_states.shape[:-1])
            hidden_states = hidden_states.masked_fill(padding_mask.unsqueeze(-1), 0.0)
        given = {"padding_mask": padding_mask, "cu_seqlens": cu_seqlens}
        given = {name: value for name, value in given.items() if value is not None}
        probs, routing_map = self.router(hidden_states, **given)  # [S, B, H] -> [T, E + Z], [T, E + Z]
        probs, zero_probs = probs.tensor_split([self.config.num_moe_experts], dim=1)  # -> [T, E], [T, Z]
        routing_map = routing_map[:, : self.config.num_moe_experts]  # -> [T, E]
        routing_map = self.routing_map_padding(routing_map)  # [T, E] -> [T, E], a padded clone
        if torch.compiler.is_compiling():
            output = _as_one_operator(self, hidden_states, probs, routing_map)  # -> [S, B, H]
        else:
            output = self.run(self._expert_path, hidden_states, probs, routing_map)  # -> [S, B, H]
        if self.zero_experts is not None:
            output = output + self.zero_experts(hidden_states, zero_probs)
        return output if padding_mask is None else output.masked_fill(padding_mask.unsqueeze(-1), 0.0)

    def _expert_path(self, hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        """Everything after the decision: hidden_states [S, B, H], probs [T, E], routing_map [T, E] -> [S, B, H]."""
        dispatcher, num_chunks = self.token_dispatcher, self.config.moe_dispatch_num_chunks
        latent = self.fc1_latent_proj(hidden_states)  # [S, B, H] -> [S, B, latent]
        departed = dispatcher.start_dispatch(
            latent, probs, routing_map, num_chunks
        )  # chunks of the T tokens, under way
        early, late = (self.shared_experts, None) if self._overlaps_shared_experts else (None, self.shared_experts)
        shared = early(hidden_states) if early is not None else None  # -> [S, B, H], while tokens travel
        deferred = _deferred_gradients(self.experts) if num_chunks > 1 else ()  # one gradient for all chunks
        returning = []
        for in_transit, plan in departed:
            expert_input, plan = dispatcher.dispatch_postprocess(in_transit, plan)  # -> [R, latent], M slots
            expert_input = self._counted(expert_input)
            expert_output = self.experts(expert_input, *deferred)  # [R, latent] -> [R, latent]
            returning.append((dispatcher.start_combine(expert_output, plan), plan))
        chunks = [dispatcher.combine_postprocess(rows, plan) for rows, plan in returning]  # -> [T / chunks, latent]
        latent = chunks[0] if num_chunks == 1 else torch.cat(chunks).view_as(latent)  # -> [S, B, latent]
        output = self.fc2_latent_proj(latent)  # [S, B, latent] -> [S, B, H]
        shared = late(hidden_states) if late is not None else shared
        return output if shared is None else output + shared

    def _counted(self, expert_input: ExpertInput) -> ExpertInput:
        """Return the same input; in training its M slots count once, when the gradient of its probs is there."""
        if not (self.training and torch.is_grad_enabled()):
            return expert_input
        num_slots = expert_input.probs.shape[0]

        def count() -> None:
            self.computed_slots.add_(num_slots)

        return replace(expert_input, probs=on_backward(expert_input.probs, count))

    def reset_parameters(self) -> None:
        """Zero the counter of slots; each stage has a method of this name for its own parameters."""
        self.computed_slots.zero_()

    @property
    def _overlaps_shared_experts(self) -> bool:
        """Whether there is a shared expert that runs while tokens travel."""
        return self.shared_experts is not None and self.config.moe_shared_expert_overlap

    __deepcopy__ = deepcopy_sharing_groups

    @property
    def _dispatcher_name(self) -> str:
        """The dispatcher in use, and what it was asked for as."""
        kind, name = self.config.moe_token_dispatcher_type, self.config.dispatcher_name
        mode = ", capacity mode" if self.config.has_static_shapes else ""
        return f"{name if kind == name else f'{name} (asked for as {kind})'}{mode}"

    @property
    def _padding(self) -> str:
        """To which multiple slots are padded, why and where."""
        config = self.config
        if config.pad_multiple == 1:
            return "off"
        where = "the routing map, else slots" if config.moe_router_padding_for_quantization else "slots"
        return f"to {config.pad_multiple} ({config.quantization_name or config.fp8_recipe}), {where}"

    @property
    def _recomputes(self) -> str:
        """What backward computes again."""
        if self.config.moe_layer_recompute:
            return "dispatch, experts, combine"
        of_experts = {"activation": "the experts' activation", "mlp": "the experts' first GEMM and activation"}
        return "off" if self.config.moe_recompute is None else of_experts[self.config.moe_recompute]

    def describe(self) -> str:
        """Return what this layer is made of and which choices are in use, one line a stage."""
        config = self.config
        shared = config.moe_shared_expert_intermediate_size
        number = "" if self.layer_number is None else f" {self.layer_number}"
        lines = [
            f"MoELayer{number}: hidden {config.hidden_size}, {config.num_moe_experts} experts of width"
            f" {config.moe_ffn_hidden_size}, top-{config.moe_router_topk}",
            f"  router      {self.router.extra_repr()}, aux loss {config.moe_aux_loss_coeff},"
            f" z-loss {config.moe_z_loss_coeff}",
            f"  padding     {self._padding}",
            f"  dispatcher  {self._dispatcher_name}, {self.token_dispatcher.extra_repr()}",
            f"  overlap     {config.moe_dispatch_num_chunks} chunks, shared expert"
            f" {'while tokens travel' if self._overlaps_shared_experts else 'after them'}",
            f"  experts     {self.experts.extra_repr()}",
            f"  latent      {config.moe_latent_size or 'off'}",
            f"  zero        {'none' if self.zero_experts is None else self.zero_experts.extra_repr()}",
            f"  shared      {'none' if shared is None else f'width {shared}, gate {config.moe_shared_expert_gate}'}",
            f"  recompute   {self._recomputes}",
        ]
        return "\n".join(lines)


class LatentProjection(nn.Linear):
    """A linear without bias between hidden_size and moe_latent_size."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the projected tokens, computed in `gemm_dtype`: [..., in] -> [..., out]."""
        dtype = gemm_dtype(hidden_states.dtype, hidden_states.device)
        with no_autocast(hidden_states.device):
            return (hidden_states.to(dtype) @ self.weight.to(dtype).t()).to(hidden_states.dtype)


def _latent_projections(config: MoEConfig) -> tuple[nn.Module, nn.Module]:
    """Return the projections into and out of the latent width, or two identities."""
    if config.moe_latent_size is None:
        return nn.Identity(), nn.Identity()
    latent, hidden = config.moe_latent_size, config.hidden_size
    into = LatentProjection(hidden, latent, bias=False, dtype=config.params_dtype)
    out_of = LatentProjection(latent, hidden, bias=False, dtype=config.params_dtype)
    for projection in (into, out_of):
        nn.init.normal_(projection.weight, std=config.init_method_std)
    return into, out_of


def _deferred_gradients(experts: nn.Module) -> tuple[object, ...]:
    """Return what the experts take beside their input in each of several chunks; nothing if they have no such thing."""
    make = getattr(experts, "deferred_gradients", None)
    deferred = None if make is None else make()
    return () if deferred is None else (deferred,)


def _as_one_operator(layer: MoELayer, *args: Tensor) -> Tensor:
    """Put the expert path into the graph that is being compiled."""
    from moe.compiled import expert_path

    return expert_path(layer, *args)


def _directly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Run the function and keep what its backward needs."""
    return function(*args)


def _recomputed(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Run the function, keep its arguments alone, and run it again in backward."""
    return checkpoint(function, *args, use_reentrant=False)
