"""Train a small MoE language model on text, byte by byte, with Megatron's flags.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --expert-model-parallel-size 2 --output-dir runs/try

Runs under torchrun or as one process, on the CPU (gloo) or on GPUs (--device cuda, NCCL). What a run does is a function
of its flags alone: data and learning rate depend on the step, so a run that is stopped and resumed with --load ends
bitwise where the uninterrupted one does.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from run_picture import draw_report
from run_report import ProgressBar, RunLog, draw_expert_load, draw_loss, sample_metrics, summary_table
from text_data import VOCAB_SIZE, ByteCorpus, SequenceSampler, default_text_files, find_text_files

from moe import (
    AsyncCheckpointer,
    MasterWeights,
    MoEGPT,
    ProcessGroups,
    TransformerConfig,
    apply_fsdp,
    clip_grad_norm,
    collect_metrics,
    finalize_gradients,
    keep_quantized_weights,
    update_delayed_scales,
    update_expert_bias,
)
from moe.arguments import add_config_arguments, add_parallel_arguments, config_from_args, groups_from_args
from moe.checkpoint import latest_step, load_checkpoint, save_checkpoint
from moe.checkpoint_folders import whole_steps
from moe.metrics import BYTES, FIGURES, LOSSES
from moe.parallel import all_ranks_succeeded, dense_parameters, expert_parameters, split_by_mesh, sum_over_world

BATCH_FLAGS = ("seq_length", "micro_batch_size", "global_batch_size")
STEP_FLAGS = (
    "train_iters",
    "exit_interval",
    "eval_interval",
    "eval_iters",
    "save_interval",
    "save_keep_last",
    "ckpt_step",
)
NOT_NEGATIVE = ("lr", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "sample_bytes")

DEFAULT_AUX_LOSS_COEFF = 0.01  # where no type of balancing is asked for


class FlagParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print and exit, so that one rank tells the user and not all of them."""

    def parse_args(self, *args, **kwargs) -> argparse.Namespace:
        """Parse, and weight the switch loss where no other way to balance is asked for."""
        parsed = super().parse_args(*args, **kwargs)
        if parsed.moe_aux_loss_coeff is None:
            is_default = parsed.moe_router_load_balancing_type == "aux_loss" and parsed.moe_router_type == "topk"
            parsed.moe_aux_loss_coeff = DEFAULT_AUX_LOSS_COEFF if is_default else 0.0
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise ValueError with argparse's message."""
        raise ValueError(f"{message.rstrip('.')}; --help lists the flags.")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the config's flags, the parallel sizes and those of training."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_config_arguments(parser, TransformerConfig)
    add_parallel_arguments(parser)
    parser.set_defaults(hidden_size=64, num_moe_experts=8, moe_ffn_hidden_size=128, num_layers=2, num_attention_heads=4)
    parser.set_defaults(vocab_size=VOCAB_SIZE, moe_aux_loss_coeff=None)
    add = parser.add_argument_group("training").add_argument
    add("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo; cuda: NCCL")
    add("--distributed-timeout-minutes", type=float, default=5.0, help="a collective that waits longer ends the job")
    add("--data-path", nargs="*", help="text files or folders; default: Python's standard library sources")
    add("--seq-length", type=int, default=64, help="bytes of a sequence")
    add("--micro-batch-size", type=int, default=4, help="sequences of a rank in one forward")
    add("--global-batch-size", type=int, help="sequences of a step over all ranks; default: one micro-batch a rank")
    add("--train-iters", type=int, default=50, help="optimizer steps in all")
    add("--exit-interval", type=int, help="stop after this many steps in all, as if interrupted")
    add("--lr", type=float, default=3e-3, help="highest learning rate")
    add("--min-lr", type=float, default=3e-4, help="learning rate at the last step")
    add("--lr-warmup-iters", type=int, default=10, help="steps of linear warm-up; a cosine follows")
    add("--weight-decay", type=float, default=0.1, help="of matrices; norms and biases have none")
    add("--adam-beta1", type=float, default=0.9)
    add("--adam-beta2", type=float, default=0.95)
    add("--adam-eps", type=float, default=1e-8)
    add("--clip-grad", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    add("--use-torch-fsdp2", action="store_true", help="shard parameters, gradients and optimizer state (FSDP2)")
    add("--fsdp-compute-dtype", choices=("bf16",), help="with --use-torch-fsdp2: compute in it, over fp32 parameters")
    add("--optimizer-impl", choices=("foreach", "fused"), help="of AdamW; default: torch's choice")
    add("--seed", type=int, default=1234, help="of initial weights and of the order of the data")
    add("--eval-interval", type=int, default=25, help="steps between two looks at the held-out text")
    add("--eval-iters", type=int, default=4, help="micro-batches of a rank in one look")
    add("--save", type=Path, help="folder for checkpoints")
    add("--save-interval", type=int, default=50, help="steps between two checkpoints; the last step is saved too")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--save-keep-last", type=int, default=2, help="checkpoints that stay in --save")
    add("--exit-signal-handler", action="store_true", help="SIGTERM ends the run after its step, with a checkpoint")
    add("--load", type=Path, help="go on from the latest checkpoint in this folder, if there is one")
    add("--ckpt-step", type=int, help="load the checkpoint of this step, not the latest")
    add("--output-dir", type=Path, help="folder for metrics.jsonl, pictures and the TensorBoard log")
    add("--sample-bytes", type=int, default=160, help="length of the text sampled at the end; 0: none")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for training flags out of range."""
    for name in BATCH_FLAGS + STEP_FLAGS + NOT_NEGATIVE:
        value, lowest = getattr(args, name), 0 if name in NOT_NEGATIVE else 1
        if value is not None and not lowest <= value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} ({value}) must be a finite number and at least {lowest}.")
    if not 0 < args.distributed_timeout_minutes < math.inf:
        raise ValueError(f"--distributed-timeout-minutes ({args.distributed_timeout_minutes}) must be above 0.")
    if args.vocab_size < VOCAB_SIZE:
        raise ValueError(f"--vocab-size ({args.vocab_size}) must be at least {VOCAB_SIZE}: a token is a byte.")
    if args.ckpt_step is not None and args.load is None:
        raise ValueError(f"--ckpt-step ({args.ckpt_step}) says which checkpoint of --load to take; give --load too.")
    for name in ("async_save", "exit_signal_handler"):
        if getattr(args, name) and args.save is None:
            raise ValueError(f"--{name.replace('_', '-')} belongs to --save; give it too.")
    if args.load and args.load.exists() and not args.load.is_dir():
        raise ValueError(f"--load ({args.load}) must be a folder that --save wrote.")
    if args.fsdp_compute_dtype and not args.use_torch_fsdp2:
        raise ValueError(f"--fsdp-compute-dtype ({args.fsdp_compute_dtype}) belongs to --use-torch-fsdp2; give it too.")
    if args.params_dtype == torch.float16:
        raise ValueError("--fp16 needs loss scaling, which this script does not have; use --bf16 or fp32.")
    num_gpus, num_ranks_here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if args.device == "cuda" and num_gpus < num_ranks_here:
        raise ValueError(f"--device cuda: {num_gpus} GPUs for {num_ranks_here} ranks; start fewer or use --device cpu.")


def start_process_group(device: str = "cpu", timeout_minutes: float = 1.0) -> None:
    """Join the other ranks if torchrun started this process; else stay alone."""
    if "WORLD_SIZE" not in os.environ:
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(minutes=timeout_minutes)
    backend = "nccl" if device == "cuda" else "gloo"
    # torchrun (2.13) keeps one store over its restarts, and ranks would find the addresses of those that died. On one
    # host its count of restarts keeps them apart; on several see docs/two-hosts.md.
    is_one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if (restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == "0" or not is_one_host:
        dist.init_process_group(backend, timeout=timeout)
        return
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"restart {restarts}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


@contextmanager
def refused_once() -> Iterator[None]:
    """Run a block of the set-up on every rank; what the user can mend is told once, and all ranks exit with 2.

    Collectives: one all_ranks_succeeded, and a second one after rank 0 has printed: torchrun ends all once one leaves.
    """
    error: BaseException | None = None
    try:
        yield
    except (ValueError, OSError, ImportError) as caught:
        error = caught
    if error and not dist.is_initialized():
        start_process_group()
    texts = all_ranks_succeeded(error)
    failed = [rank for rank, text in enumerate(texts) if text]
    if failed:
        where = "" if len(failed) == len(texts) else f"rank {failed[0]}: "
        if not dist.is_initialized() or dist.get_rank() == 0:
            text = texts[failed[0]].removeprefix("ValueError: ")
            print(f"pretrain_gpt.py: {where}{text}", file=sys.stderr, flush=True)
        all_ranks_succeeded(None)
        sys.exit(2)


def num_microbatches(args: argparse.Namespace, groups: ProcessGroups) -> int:
    """Return the micro-batches of a rank in one step."""
    share = args.micro_batch_size * groups.dp.size()
    total = args.global_batch_size or share
    if total % share:
        raise ValueError(
            f"--global-batch-size ({total}) must be divisible by --micro-batch-size ({args.micro_batch_size}) x"
            f" data-parallel ranks ({groups.dp.size()}) = {share}."
        )
    return total // share


def build_optimizer(model: MoEGPT, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Return AdamW; DTensors of one mesh and plain parameters stand in groups of their own, masters for FP8 ones."""
    masters = MasterWeights(model)
    param_groups = [
        {
            "params": [p for p in masters.of(parameters) if (p.ndim > 1) == is_matrix],
            "weight_decay": args.weight_decay * is_matrix,
        }
        for kind in (dense_parameters(model), expert_parameters(model))
        for parameters in split_by_mesh(kind)
        for is_matrix in (True, False)
    ]
    param_groups = [group for group in param_groups if group["params"]]
    betas = (args.adam_beta1, args.adam_beta2)
    impl = {args.optimizer_impl: True} if args.optimizer_impl else {}
    optimizer = torch.optim.AdamW(param_groups, lr=args.lr, betas=betas, eps=args.adam_eps, **impl)
    masters.attach(optimizer)
    return optimizer


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then a cosine to min_lr."""
    if step < args.lr_warmup_iters:
        return args.lr * (step + 1) / args.lr_warmup_iters
    done = (step - args.lr_warmup_iters) / max(1, args.train_iters - args.lr_warmup_iters)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(1.0, done)))


class Trainer:
    """The state of a run: model, optimizer, data and where it writes."""

    def __init__(self, args: argparse.Namespace, config: TransformerConfig, corpus: ByteCorpus) -> None:
        self.args, self.corpus, self.groups = args, corpus, groups_from_args(args, args.device)
        self.is_signalled = False
        timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
        self.checkpointer = AsyncCheckpointer(timeout) if args.async_save else None
        self.rank, self.num_ranks = self.groups.tp_dp_cp.rank(), self.groups.tp_dp_cp.size()
        self.data_rank, self.num_data_ranks = self.groups.dp.rank(), self.groups.dp.size()
        self.device = torch.device(args.device)
        self.num_microbatches = num_microbatches(args, self.groups)
        self.tokens_per_step = self.num_data_ranks * self.num_microbatches * args.micro_batch_size * args.seq_length
        self.train_data = SequenceSampler(corpus.train, args.seq_length, args.micro_batch_size, args.seed)
        self.heldout_data = SequenceSampler(corpus.valid, args.seq_length, args.micro_batch_size, args.seed)
        if args.seq_length % (tp := self.groups.tp.size()):
            raise ValueError(
                f"--seq-length ({args.seq_length}) must be divisible by --tensor-model-parallel-size ({tp})."
            )
        torch.manual_seed(args.seed)
        self.model = MoEGPT(config, self.groups).to(self.device)
        if args.use_torch_fsdp2:
            apply_fsdp(self.model, self.groups, param_dtype=torch.bfloat16 if args.fsdp_compute_dtype else None)
        self.optimizer = build_optimizer(self.model, args)
        self.step = self._resume()
        self.say(
            f"{corpus.num_files} text files, {len(corpus.train):,} bytes to train on, {len(corpus.valid):,} held out;"
            f" {self.num_ranks} ranks, {self.num_microbatches} micro-batches of {args.micro_batch_size} x"
            f" {args.seq_length} bytes a step"
        )
        layers = self.model.moe_layers()
        self.say(next(iter(layers.values())).describe() if layers else "no MoE layer: every block is dense")
        if args.save and self.rank == 0:
            self._check_save_folder()
        self.log = RunLog(args.output_dir, use_tensorboard=True) if args.output_dir and self.rank == 0 else None
        if self.log:
            self.log.truncate_after(self.step)

    def end_by_signal(self, number: int, _: object) -> None:
        """Handle a signal: end at once, or after the step, and remember why: libraries may wrap the error."""
        self.is_signalled = True
        if number != signal.SIGTERM or not self.args.exit_signal_handler:
            raise KeyboardInterrupt

    def _is_told_to_end(self) -> bool:
        """Return whether any rank got the signal that ends the run after its step. One all_reduce, if asked for."""
        if not self.args.exit_signal_handler:
            return False
        told = torch.tensor(int(self.is_signalled), device=self.device)
        return bool(sum_over_world(told, self.groups).item())

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def _resume(self) -> int:
        """Load a checkpoint of --load and return its step; 0 if there is none. The flags' hyper-parameters stay."""
        args = self.args
        if args.load is None:
            return 0
        # A crash may leave a first checkpoint whole and not yet named as the latest.
        newest = args.ckpt_step or latest_step(args.load) or max(whole_steps(args.load), default=None)
        if newest is None:
            self.say(f"no checkpoint in {args.load}: starting from scratch")
            return 0
        kept = ("weight_decay", "betas", "eps")
        options = [{key: group[key] for key in kept} for group in self.optimizer.param_groups]
        try:
            loaded = load_checkpoint(args.load, self.model, self.optimizer, step=newest)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"{error} --ckpt-step STEP loads another one.") from error
        for group, option in zip(self.optimizer.param_groups, options, strict=True):
            group.update(option)
        self.say(f"resumed from {loaded.path} at step {loaded.step}")
        return loaded.step

    def _check_save_folder(self) -> None:
        """Raise OSError before the training if --save cannot be written; warn of a run that it will write over."""
        folder = self.args.save
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if (newest := latest_step(folder) or 0) > self.step:
            self.say(f"{folder} names step {newest} as its latest; this run starts at {self.step} and will rename it")

    def _save(self, loss: float) -> None:
        """Save a checkpoint. Raises OSError on all ranks where one could not write."""
        save = save_checkpoint if self.checkpointer is None else self.checkpointer.save
        keep_last = self.args.save_keep_last
        try:
            save(self.args.save, self.step, self.model, self.optimizer, extra={"loss": loss}, keep_last=keep_last)
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{error}; earlier checkpoints are untouched.") from error

    def _finish_saving(self) -> None:
        """Wait for the last checkpoint. Raises OSError on all ranks where one could not write."""
        try:
            self.checkpointer.close()
        except (RuntimeError, ValueError) as error:
            raise OSError(f"{error}; earlier checkpoints are untouched.") from error

    def train_step(self) -> dict:
        """Run one optimizer step and return its record."""
        started, args = time.perf_counter(), self.args
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(args, self.step)
        self.model.zero_grad(set_to_none=True)
        self.groups.counter.reset()  # bytes of this step alone
        torch.manual_seed(args.seed + 1 + self.step * self.num_ranks + self.rank)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with keep_quantized_weights(self.model):
            for micro_step in range(self.num_microbatches):
                inputs, targets = self.train_data.batch(self.step, micro_step, self.data_rank, self.num_data_ranks)
                loss = self.model(inputs.to(self.device), targets.to(self.device))  # [B, S], [B, S] -> []
                loss.backward()
                loss_sum += self._per_token(loss.detach(), targets)
        num_tokens = targets.numel() * self.num_microbatches if self.model.config.calculate_per_token_loss else None
        finalize_gradients(self.model, self.groups, self.num_microbatches, num_tokens=num_tokens)
        grad_norm = clip_grad_norm(self.model, args.clip_grad or math.inf, self.groups).item()
        mean_loss = sum_over_world(loss_sum, self.groups).item() / (self.num_ranks * self.num_microbatches)
        if not math.isfinite(mean_loss) or not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"the loss is {mean_loss} and the gradient norm {grad_norm}: stopped before weights or checkpoints are"
                f" spoilt; try a lower --lr ({args.lr})"
            )
        self.optimizer.step()
        update_expert_bias(self.model, self.groups)
        update_delayed_scales(self.model)
        self.step += 1
        metrics = collect_metrics(self.model, self.groups)
        return {
            "step": self.step,
            "loss": mean_loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm,
            "tokens_per_s": self.tokens_per_step / (time.perf_counter() - started),
            "expert_load": metrics.tokens_per_expert.tolist(),
            **{name: getattr(metrics, name).mean().item() if len(metrics.layer_names) else 0.0 for name in LOSSES},
            **{name: getattr(metrics, name).tolist() for name in FIGURES},
            **{name: getattr(metrics, name) for name in BYTES},
        }

    def _per_token(self, loss: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss per token of a batch, whichever of mean and sum the model gives."""
        return loss / targets.numel() if self.model.config.calculate_per_token_loss else loss

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the held-out text in nats per byte, the same windows at every call."""
        self.model.eval()
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        num_batches = self.args.eval_iters * self.num_data_ranks
        for inputs, targets in self.heldout_data.heldout_batches(num_batches, self.data_rank, self.num_data_ranks):
            losses += self._per_token(self.model(inputs.to(self.device), targets.to(self.device)), targets)
        self.model.train()
        return sum_over_world(losses, self.groups).item() / (self.args.eval_iters * self.num_ranks)

    @torch.no_grad()
    def sample(self, prompt: bytes, num_bytes: int, generator: torch.Generator) -> str:
        """Return the prompt and num_bytes sampled after it; every rank takes part and gets the same text."""
        text = list(prompt)
        self.model.eval()
        for _ in range(num_bytes):
            known = text[-self.args.seq_length :]
            window = torch.tensor([known + [0] * (-len(known) % self.groups.tp.size())], device=self.device)  # [1, S]
            padding = torch.arange(window.shape[1], device=self.device).unsqueeze(0) >= len(known)
            logits = self.model(window, padding_mask=padding)[0, len(known) - 1]  # -> [V]
            scores = logits[:VOCAB_SIZE].float().cpu() / 0.8
            text.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
        self.model.train()
        return bytes(text).decode("utf-8", errors="replace")

    def train(self) -> None:
        """Run to the last step; log, evaluate and save on the way; report at the end."""
        args, first_step, started = self.args, self.step, time.perf_counter()
        last_step = min(args.train_iters, args.exit_interval or args.train_iters)
        bar = ProgressBar(args.train_iters, first_step) if self.rank == 0 else None
        record: dict = {}
        is_ending = False
        while self.step < last_step and not is_ending:
            record = self.train_step()
            is_ending = self._is_told_to_end()
            if self.step % args.eval_interval == 0 or self.step == last_step or is_ending:
                record["eval_loss"] = self.evaluate()
            if bar:
                shown = {name: record.get(name) for name in ("loss", "tokens_per_s", "eval_loss")}
                shown["num_dead_experts"] = sum(record["num_dead_experts"])
                shown["drop_rate"] = max(record["drop_rate"], default=0.0)
                bar.update(self.step, **shown, imbalance=max(record["load_imbalance"], default=1.0))
            if self.log:
                self.log.write(record)
            if args.save and (self.step % args.save_interval == 0 or self.step == last_step or is_ending):
                self._save(record["loss"])
        if self.checkpointer is not None:
            self._finish_saving()
        if bar:
            bar.close()
        if record:
            self.report(record, self.step - first_step, time.perf_counter() - started)
        else:
            self.say(f"nothing to do: the checkpoint is at step {self.step} of {last_step}")

    def report(self, record: dict, num_steps: int, seconds: float) -> None:
        """Sample text, draw the pictures and print the figures."""
        args = self.args
        if args.sample_bytes:
            generator = torch.Generator().manual_seed(args.seed)
            for prompt in (b"def ", b"import "):
                self.say(f"--- sampled after {prompt.decode()!r}\n{self.sample(prompt, args.sample_bytes, generator)}")
        if self.rank:
            return
        unigram = self.corpus.unigram_entropy()
        files = self._draw(unigram) if self.log else []
        print(
            summary_table(
                num_steps=num_steps,
                num_tokens=num_steps * self.tokens_per_step,
                seconds=seconds,
                train_loss=record["loss"],
                heldout_loss=record["eval_loss"],
                unigram_nats=unigram,
                load_imbalance=record["load_imbalance"],
                files=files,
            )
        )

    def _draw(self, unigram_nats: float) -> list[Path]:
        """Write the pictures and return what the run has left on disk."""
        self.log.close()
        files, folder = [self.log.path], self.args.output_dir
        try:
            records = sample_metrics(self.log.path)
            draw_loss(records, folder / "loss.png", unigram_nats)
            files.append(folder / "loss.png")
            if self.model.moe_layers():
                draw_expert_load(records, folder / "expert_load.png")
                files.append(folder / "expert_load.png")
            draw_report(records, folder / "report.png", folder.resolve().name)
            files.append(folder / "report.png")
        except ImportError as error:
            print(f"no pictures: {error}")
        return files


def report_stop(trainer: Trainer, error: BaseException) -> None:
    """Say on standard error why this rank stops and how to go on."""
    reason = "ended by a signal from outside" if trainer.is_signalled else str(error)
    lines = [f"\nrank {trainer.rank}: stopped in step {trainer.step + 1}: {reason}"]
    if trainer.num_ranks > 1:
        lines.append("A closed connection, a timeout or a signal says that another rank died: torchrun names it below.")
    if trainer.args.save:
        lines.append(f"The same command with --load {trainer.args.save} goes on from the last checkpoint.")
    print("\n".join(lines), file=sys.stderr, flush=True)


def main() -> None:
    """Read the flags, join the ranks, train."""
    sys.stdout.reconfigure(errors="replace")  # sampled bytes are any text; the terminal may know ASCII alone
    with refused_once():
        args = build_parser().parse_args()
        check_arguments(args)
        config = config_from_args(args, TransformerConfig)
        files, num_binary = find_text_files(args.data_path) if args.data_path else (default_text_files(), 0)
        corpus = ByteCorpus.from_files(files)
        start_process_group(args.device, args.distributed_timeout_minutes)
    with refused_once():
        trainer = Trainer(args, config, corpus)
    if num_binary:
        trainer.say(f"{num_binary} binary files left out")
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGTERM is what torchrun sends when another rank has died
        signal.signal(number, trainer.end_by_signal)
    try:
        trainer.train()
    except (OSError, FloatingPointError, RuntimeError, KeyboardInterrupt) as error:
        report_stop(trainer, error)
        if isinstance(error, RuntimeError) and not trainer.is_signalled:
            raise  # a traceback follows: it may be a fault of this program
        sys.exit(1)
    if dist.is_initialized():
        # Leave together: a thread of gloo that still holds a tensor when its process ends aborts it.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
