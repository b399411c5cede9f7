"""TopKRouter: decides which experts see a token, and with what weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from router.attached import LossGroups, balancing_losses
from router.balancing import qb_dual_update, sinkhorn
from router.capacity import apply_router_token_dropping, apply_token_rounding
from router.choice import balanced_experts, choose_experts, column_counts
from router.collectives import all_gather_rows, deepcopy_sharing_groups
from router.config import AUX_LOSSES, ROUTER_DTYPES, RouterConfig
from router.fused import backend_of, is_te_installed
from router.gating import apply_input_jitter, apply_random_logits, router_gating_linear
from router.losses import Sequences, attach_loss, on_backward
from router.scores import RoutingRule, dense_weights
from router.topk import route

FIRST_TO_COMPILE = "2.13"  # the first PyTorch whose compiled graphs hold objects


class RouterGroups(Protocol):
    """What the router asks of its groups."""

    @property
    def tp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold slices of one micro-batch: tensor (sequence slices) and context parallel."""

    @property
    def cp(self) -> dist.ProcessGroup:
        """Context-parallel ranks."""

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks over which dense gradients are averaged."""

    @property
    def tp_dp_cp(self) -> dist.ProcessGroup:
        """All ranks."""

    @property
    def ep(self) -> dist.ProcessGroup:
        """Expert-parallel ranks."""


class DecisionRecorder(Protocol):
    """What `RoutingRecords` puts into `TopKRouter.recorder` while it records or replays."""

    def expert_ids(self, logits: Tensor, choose: Callable[[], Tensor]) -> Tensor:
        """Return the [T, K] int64 ids for logits [T, E]; choose() is what the router would take."""

    def kept_map(self, compute: Callable[[], Tensor]) -> Tensor:
        """Return the [T, E] map after dropping or rounding; compute() is what the router would keep."""


class TopKRouter(nn.Module):
    """Linear gate, score function, top-k, capacity, balancing losses.

    Everything a step counts advances in backward, once per decision, however often the forward is repeated by
    activation checkpointing (in forward, if probs take no gradient). In eval and under no_grad nothing is counted and
    no loss is attached.

    Args:
        config: see RouterConfig.
        groups: process groups; None on one process. Balancing losses span `groups.tp_cp`, whose ranks hold slices of
            one micro-batch; global_aux_loss spans all ranks.

    Attributes:
        weight: [E, H] parameter in params_dtype. E here includes zero-computation experts, as in every shape below.
        bias: [E] parameter, or None without add_bias_linear.
        expert_bias: [E] fp32 buffer in the state dict, or None without moe_router_enable_expert_bias.
        qb_beta: [E] fp32 buffer in the state dict, the bias of quantile_balancing; else None.
        tokens_per_expert: [E] int64, slots that tokens chose since it was last zeroed; padding does not count.
        dropped_tokens_per_expert, added_tokens_per_expert: [E] int64, what capacity or rounding took or added.
        local_tokens_per_expert: [E] int64, the counts for `update_expert_bias`; None without expert_bias.
        global_tokens: [E + 1] int64, counts and tokens of the micro-batches since `finalize_gradients`; None without
            global_aux_loss.
        aux_loss, seq_aux_loss, global_aux_loss, z_loss: [] fp32, the last losses without their coefficient. Their mean
            over all ranks is the loss to log; the gradient takes its own way.
        loss_scale: [] fp32, factor on the gradients of these losses; see `set_loss_scale`.
        recorder: set by `RoutingRecords` while it records or replays; else None.

    Source: Megatron-Core router, class of the same name. Differs: padding is routed nowhere; the bias counts choices
        before capacity, and in training alone; jitter is for training.
    """

    bias: nn.Parameter | None
    tokens_per_expert: Tensor
    dropped_tokens_per_expert: Tensor
    added_tokens_per_expert: Tensor
    expert_bias: Tensor | None
    local_tokens_per_expert: Tensor | None
    qb_beta: Tensor | None
    qb_beta_sum: Tensor | None
    qb_beta_count: Tensor | None
    global_tokens: Tensor | None
    loss_scale: Tensor
    recorder: DecisionRecorder | None

    def __init__(self, config: RouterConfig, groups: RouterGroups | None = None) -> None:
        super().__init__()
        self.config = config
        self.router_dtype = ROUTER_DTYPES[config.moe_router_dtype]
        self.loss_groups = _loss_groups(groups)
        self.ep_size = groups.ep.size() if groups else 1
        self.num_experts = config.num_router_experts
        self.rule = _rule(config)
        self.recorder = None
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size, dtype=config.params_dtype))
        bias = (
            nn.Parameter(torch.empty(self.num_experts, dtype=config.params_dtype)) if config.add_bias_linear else None
        )
        self.register_parameter("bias", bias)
        self._register_buffers()
        self.handle = handle_of(self)
        self.register_load_state_dict_post_hook(_keep_biases_in_fp32)
        self.reset_parameters()

    def _register_buffers(self) -> None:
        config, num_experts = self.config, self.num_experts
        has_quantiles = "quantile_balancing" in config.balancing_types

        def counts(name: str, size: tuple[int, ...], *, present: bool = True) -> None:
            buffer = torch.zeros(size, dtype=torch.int64) if present else None
            self.register_buffer(name, buffer, persistent=False)

        def values(name: str, size: tuple[int, ...] = (), *, present: bool = True) -> None:
            buffer = torch.zeros(size, dtype=torch.float32) if present else None
            self.register_buffer(name, buffer, persistent=name in ("expert_bias", "qb_beta"))

        for name in ("tokens_per_expert", "dropped_tokens_per_expert", "added_tokens_per_expert"):
            counts(name, (num_experts,))
        counts("local_tokens_per_expert", (num_experts,), present=config.moe_router_enable_expert_bias)
        counts("global_tokens", (num_experts + 1,), present="global_aux_loss" in config.aux_loss_coeffs)
        counts("qb_beta_count", (), present=has_quantiles)
        values("expert_bias", (num_experts,), present=config.moe_router_enable_expert_bias)
        for name in ("qb_beta", "qb_beta_sum"):
            values(name, (num_experts,), present=has_quantiles)
        for name in (*AUX_LOSSES, "z_loss", "loss_scale"):
            values(name)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the gate from a normal distribution (torch's default generator); zero biases, counters and losses.

        After `to_empty` call it before a state is loaded: counters, losses and loss_scale are in no state dict.
        """
        nn.init.normal_(self.weight, std=self.config.init_method_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for buffer in self.buffers():
            buffer.zero_()
        self.loss_scale.fill_(1.0)

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Route every token.

        Args:
            hidden_states: [S, B, H] or [T, H]; any float dtype.
            padding_mask: [S, B] or [T] bool, True = padding: routed nowhere, counted nowhere, whatever it holds.
            cu_seqlens: [N + 1] int, for seq_aux_loss alone: offsets of N sequences packed into this rank's tokens
                (B = 1), ascending from 0. Tokens after the last offset belong to none. Under TP or CP the offsets in
                this rank's slice, N on every rank.

        Returns:
            probs [T, E] in moe_router_dtype, zero where not routed; routing_map [T, E] bool. Both are read-only.

        Raises:
            ValueError: hidden_states does not end in hidden_size, or a mask or offsets that do not fit it.
            ImportError: torch.compile with a PyTorch that is too old for it.

        Collectives: with a balancing loss in training, one all_reduce of counts over tp_cp, for global_aux_loss one
            over all ranks; with quantile_balancing in training, an all_gather of logits over tp_cp. No host sync,
            except for the sizes of that all_gather.
        """
        if torch.compiler.is_compiling():
            self._check_compilable()
        tokens, padding = self._flatten(hidden_states, padding_mask)  # [S, B, H] -> [T, H]
        if self.config.moe_input_jitter_eps is not None and self.training:
            tokens = apply_input_jitter(tokens, self.config.moe_input_jitter_eps, self.router_dtype)
        logits = router_gating_linear(tokens, self.weight, self.bias, self.router_dtype)  # [T, H] -> [T, E]
        if self.config.moe_router_force_load_balancing in (True, "random"):
            logits = apply_random_logits(logits)
        advance: dict[str, Tensor] = {}  # buffer -> what this decision adds to it
        probs, routing_map, chosen = self.decide(logits, padding, advance)  # [T, E] -> three of [T, E]
        if self._learns:
            sequences = Sequences.of(hidden_states.shape, cu_seqlens)
            probs = self._with_losses(probs, logits, chosen, padding, sequences, advance)
            probs = self._counted(probs, advance)
        return probs, routing_map

    def decide(
        self, logits: Tensor, padding: Tensor | None, advance: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decision for logits [T, E] and padding [T] bool.

        Returns:
            probs [T, E]; routing_map [T, E]; and the map as it was before capacity or rounding changed it. What the
            decision adds to a counter goes into `advance`, by the buffer's name.
        """

        def choose() -> Tensor:
            special = self._special_choice(logits, padding, advance)
            return choose_experts(logits, self.rule, self.expert_bias) if special is None else special

        if self.recorder is None:
            expert_ids = self._special_choice(logits, padding, advance)
        else:
            expert_ids = self.recorder.expert_ids(logits, choose)
        probs, routing_map = route(logits, self.rule, self.expert_bias, expert_ids, backend=self._backend(logits))
        if padding is not None:
            routing_map = routing_map & ~padding.unsqueeze(-1)
            probs = probs.masked_fill(padding.unsqueeze(-1), 0.0)
        advance["tokens_per_expert"] = column_counts(routing_map)
        return *self._limit(logits, probs, routing_map, padding, advance), routing_map

    def _flatten(self, hidden_states: Tensor, padding_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[S, B, H], [S, B] -> [T, H] with padding rows zeroed, so that whatever they held stays there; [T]."""
        shape, hidden_size = hidden_states.shape, self.config.hidden_size
        if shape[-1] != hidden_size:
            raise ValueError(f"hidden_states ({tuple(shape)}) must end in hidden_size ({hidden_size}).")
        tokens = hidden_states.reshape(-1, hidden_size)
        if padding_mask is None:
            return tokens, None
        check_padding_mask(padding_mask, shape[:-1])
        padding = padding_mask.reshape(-1)
        return tokens.masked_fill(padding.unsqueeze(-1), 0.0), padding

    def _check_compilable(self) -> None:
        """Leave the compiled graph for what it cannot hold; with fullgraph that is an error with this message.

        There is no public way to leave it: an exception would let the whole layer be traced as eager code.
        """
        if self.handle is None:
            text = f"torch.compile of a router needs torch >= {FIRST_TO_COMPILE}, not {torch.__version__}"
            torch._dynamo.graph_break(msg=(text := f"{text}: pip install -U torch, or run in eager mode."))
            raise ImportError(text)
        if self.config.balancing_types == ("sinkhorn",) and self.training:
            torch._dynamo.graph_break(
                msg="moe_router_load_balancing_type 'sinkhorn' has no fixed number of iterations in training: leave"
                " fullgraph out, or choose another type."
            )
        if self.qb_beta is not None and self.loss_groups.tp_cp is not None and self._learns:
            torch._dynamo.graph_break(
                msg="moe_router_load_balancing_type 'quantile_balancing' gathers tokens over TP and CP, which may be"
                " uneven: leave fullgraph out, or choose another type."
            )
        if self.recorder is not None:
            torch._dynamo.graph_break(
                msg="RoutingRecords records and replays outside of compiled graphs: leave fullgraph out, or use the"
                " eager module meanwhile."
            )

    @property
    def _learns(self) -> bool:
        """Whether losses and counters apply: in training, and not under no_grad."""
        return self.training and torch.is_grad_enabled()

    def _backend(self, logits: Tensor) -> str | None:
        """Which code fuses the decision of these logits; None: none."""
        return backend_of(logits, fused=self.config.moe_router_fusion)

    def _special_choice(self, logits: Tensor, padding: Tensor | None, advance: dict[str, Tensor]) -> Tensor | None:
        """[T, K] ids where they are not the top-k of the scores: balanced, sinkhorn, quantile balancing; else None."""
        config = self.config
        if config.moe_router_force_load_balancing == "balanced":
            sizes = (logits.shape[0], self.rule.topk, self.num_experts, self.ep_size)
            return balanced_experts(*sizes, device=logits.device)
        if config.balancing_types == ("sinkhorn",) and self.training:
            cost = logits.detach() if padding is None else logits.detach().masked_fill(padding.unsqueeze(-1), torch.nan)
            return sinkhorn(cost).topk(self.rule.topk, dim=-1).indices
        return None if self.qb_beta is None else self._quantile_choice(logits.detach(), padding, self.qb_beta, advance)

    def _quantile_choice(
        self, logits: Tensor, padding: Tensor | None, qb_beta: Tensor, advance: dict[str, Tensor]
    ) -> Tensor:
        """[T, K] ids by quantile balancing; in training the quantile over the ranks of tp_cp is counted."""
        topk, is_padding = self.rule.topk, padding
        if not self._learns:
            return qb_dual_update(logits, topk, qb_beta, update_beta=False)[0]
        if is_padding is None:
            is_padding = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
        rows = torch.cat([logits, is_padding.to(logits.dtype).unsqueeze(-1)], dim=1)  # [T, E + 1]
        loss_groups = self.loss_groups
        rows, first = all_gather_rows(rows, group=loss_groups.tp_cp, name="tp_cp", counter=loss_groups.counter)
        ids, quantile = qb_dual_update(rows[:, :-1], topk, qb_beta, padding_mask=rows[:, -1] > 0)
        counts = (rows.isfinite().all(1) & (rows[:, -1] == 0)).any()  # [], False where no token has a say
        advance["qb_beta_sum"], advance["qb_beta_count"] = quantile * counts, counts.to(torch.int64)
        return ids[first : first + logits.shape[0]]

    def _limit(
        self, logits: Tensor, probs: Tensor, chosen: Tensor, padding: Tensor | None, advance: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Apply capacity or token rounding to probs [T, E] and the map of chosen experts [T, E]."""
        config = self.config
        if config.moe_expert_capacity_factor is not None:
            kept_probs, kept = apply_router_token_dropping(
                probs,
                chosen,
                self.rule.topk,
                config.moe_expert_capacity_factor,
                config.moe_token_drop_policy,
                config.moe_pad_expert_input_to_capacity,
                padding_mask=padding,
                capacity_tokens=config.moe_expert_capacity_tokens,
            )
        elif config.moe_token_rounding_policy is not None and self.training:
            probs = dense_weights(logits, chosen, self.rule)
            multiple, policy = config.moe_token_rounding_multiple, config.moe_token_rounding_policy
            kept_probs, kept = apply_token_rounding(probs, chosen, multiple, policy, padding_mask=padding)
        else:
            return probs, chosen
        if self.recorder is not None:
            kept = self.recorder.kept_map(lambda: kept)
            kept_probs = torch.where(kept, probs, 0.0)
        advance["dropped_tokens_per_expert"] = column_counts(chosen & ~kept)
        advance["added_tokens_per_expert"] = column_counts(kept & ~chosen)
        return kept_probs, kept

    @property
    def _chooses_plainly(self) -> bool:
        """Whether the choice is the top-k of the scores alone, which is the choice that losses count."""
        is_forced = self.recorder is not None or self.config.moe_router_force_load_balancing == "balanced"
        is_special = self.rule.group_topk is not None or self.expert_bias is not None or self.qb_beta is not None
        return not is_forced and not is_special and self.config.balancing_types != ("sinkhorn",)

    def _with_losses(
        self,
        probs: Tensor,
        logits: Tensor,
        chosen: Tensor,
        padding: Tensor | None,
        sequences: Sequences,
        advance: dict[str, Tensor],
    ) -> Tensor:
        """Return probs [T, E] with the balancing losses of logits [T, E] attached; the same tensor without losses."""
        if not self.config.aux_loss_coeffs and not self.config.moe_z_loss_coeff:
            return probs
        backend = self._backend(logits)
        losses = balancing_losses(
            self.config,
            logits,
            padding,
            sequences,
            replace(self.loss_groups, handle=self.handle) if torch.compiler.is_compiling() else self.loss_groups,
            global_tokens=self._global_tokens_so_far,
            backend=backend,
            routing_map=chosen if backend == "torch" and self._chooses_plainly else None,
        )
        for name, value in losses.logged.items():
            getattr(self, name).copy_(value)
        if losses.global_counts is not None:
            advance["global_tokens"] = losses.global_counts
        if not torch.compiler.is_compiling():
            return attach_loss(probs, losses.total, scale=self.loss_scale)
        from router import compiled

        return compiled.attach_loss(probs, losses.total, self.handle)

    @property
    def _global_tokens_so_far(self) -> Tensor | None:
        """global_tokens; in a compiled graph a copy, because backward counts into it."""
        if self.global_tokens is None or not torch.compiler.is_compiling():
            return self.global_tokens
        from router.compiled import current_value

        return current_value(self.handle, "global_tokens", self.global_tokens)

    def _counted(self, probs: Tensor, advance: dict[str, Tensor]) -> Tensor:
        """Return probs [T, E]; once their gradient is there, what the decision counted is added to the buffers."""
        if not torch.compiler.is_compiling():
            return on_backward(probs, lambda: self.advance(advance))
        from router.compiled import advance_on_backward

        return advance_on_backward(probs, self.handle, advance)

    @torch.no_grad()
    def advance(self, advance: dict[str, Tensor]) -> None:
        """Add what a decision counted, buffer -> amount, to the buffers."""
        for name, amount in advance.items():
            getattr(self, name).add_(amount)
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.add_(advance["tokens_per_expert"])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        """Move the module as nn.Module does; fp32 buffers keep their dtype and every bit."""
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = getattr(self, name)
            if moved.dtype != torch.float32:
                setattr(self, name, moved.float() if kept.is_meta else kept.to(moved.device))
        return self

    __deepcopy__ = deepcopy_sharing_groups

    def extra_repr(self) -> str:
        """Show what is decided and how when the module is printed."""
        config, rule = self.config, self.rule
        parts = [f"experts={config.num_moe_experts}", f"topk={rule.topk}"]
        if config.num_zero_experts:
            parts.insert(1, f"zero_experts={config.num_zero_experts}")
        is_pre_softmax = config.moe_router_pre_softmax
        parts.append(f"score={'pre-softmax' if is_pre_softmax else config.moe_router_score_function}")
        if rule.group_topk is not None:
            parts.append(f"groups={rule.group_topk} of {rule.num_groups}")
        if self.expert_bias is not None:
            parts.append("expert_bias=True")
        parts.append(
            f"balancing={'+'.join(config.balancing_types)}" if config.moe_router_type == "topk" else "equal load"
        )
        if config.moe_expert_capacity_factor is not None:
            parts.append(f"capacity={config.moe_expert_capacity_factor}")
        if config.moe_token_rounding_policy is not None:
            parts.append(f"rounding={config.moe_token_rounding_policy} {config.moe_token_rounding_multiple}")
        if config.moe_router_force_load_balancing:
            parts.append(f"forced={config.moe_router_force_load_balancing}")
        fusion = (
            "False" if not config.moe_router_fusion else "Transformer Engine on CUDA" if is_te_installed() else "torch"
        )
        return ", ".join([*parts, f"dtype={config.moe_router_dtype}", f"fusion={fusion}"])


def _keep_biases_in_fp32(router: nn.Module, _: object) -> None:
    """Undo what load_state_dict(..., assign=True) does with a state of another dtype."""
    for name in ("expert_bias", "qb_beta"):
        if getattr(router, name) is not None:
            setattr(router, name, getattr(router, name).float())


def check_padding_mask(padding_mask: Tensor, shape: torch.Size) -> None:
    """Raise ValueError unless the mask is bool and of the shape of the tokens."""
    if padding_mask.shape != shape or padding_mask.dtype != torch.bool:
        raise ValueError(
            f"padding_mask ({list(padding_mask.shape)}, {padding_mask.dtype}) must be bool of the shape {list(shape)},"
            " True = padding."
        )


def handle_of(module: nn.Module) -> Any:
    """Return what stands for a module in a compiled graph; None with a PyTorch that is too old for that."""
    if torch.__version__ < FIRST_TO_COMPILE:
        return None
    from router.compiled import ModuleHandle

    return ModuleHandle(module)


def _loss_groups(groups: RouterGroups | None) -> LossGroups:
    """Return over which ranks losses are taken; a group of one is None, which torch.compile can read too."""
    if groups is None:
        return LossGroups()
    tp_cp, tp_dp_cp = (group if group.size() > 1 else None for group in (groups.tp_cp, groups.tp_dp_cp))
    return LossGroups(tp_cp, tp_dp_cp, groups.cp.size(), groups.dp_cp.size(), getattr(groups, "counter", None))


def _rule(config: RouterConfig) -> RoutingRule:
    """Return how the router's experts are chosen and weighted."""
    if config.moe_router_type == "expert_choice":  # weights: the scores themselves
        is_softmax = config.moe_router_score_function == "softmax"
        return RoutingRule(
            config.moe_router_topk,
            is_softmax,
            scaling_factor=config.moe_router_topk_scaling_factor,
            score_function=config.moe_router_score_function,
        )
    if config.balancing_types == ("sinkhorn",):  # weights: sigmoid for one expert, else the softmax over all
        is_single = config.moe_router_topk == 1
        function = "sigmoid" if is_single else "softmax"
        return RoutingRule(config.moe_router_topk, use_pre_softmax=not is_single, score_function=function)
    return RoutingRule(
        config.moe_router_topk,
        config.moe_router_pre_softmax,
        config.moe_router_num_groups,
        config.moe_router_group_topk,
        config.moe_router_group_score_topk,
        config.moe_router_topk_scaling_factor,
        config.moe_router_score_function,
    )
