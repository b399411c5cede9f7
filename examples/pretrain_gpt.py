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
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from run_report import ProgressBar, RunLog, draw_expert_load, draw_loss, read_metrics, summary_table
from text_data import VOCAB_SIZE, ByteCorpus, SequenceSampler, default_text_files, find_text_files

from moe import MoEGPT, ProcessGroups, TransformerConfig, clip_grad_norm, collect_metrics, finalize_gradients
from moe.arguments import add_config_arguments, add_parallel_arguments, config_from_args, groups_from_args
from moe.checkpoint import latest_step, load_checkpoint, save_checkpoint
from moe.parallel import dense_parameters, expert_parameters, sum_over_world


def build_parser() -> argparse.ArgumentParser:
    """Return the parser: the config's flags, the parallel sizes and those of training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_config_arguments(parser, TransformerConfig)
    add_parallel_arguments(parser)
    parser.set_defaults(hidden_size=64, num_moe_experts=8, moe_ffn_hidden_size=128, num_layers=2, num_attention_heads=4)
    parser.set_defaults(vocab_size=VOCAB_SIZE, moe_aux_loss_coeff=0.01)
    group = parser.add_argument_group("training")
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: gloo; cuda: NCCL")
    group.add_argument(
        "--distributed-timeout-minutes", type=float, default=5.0, help="a collective that waits longer ends the job"
    )
    group.add_argument(
        "--data-path", nargs="*", help="text files or folders; default: Python's standard library sources"
    )
    group.add_argument("--seq-length", type=int, default=64, help="bytes of a sequence")
    group.add_argument("--micro-batch-size", type=int, default=4, help="sequences of a rank in one forward")
    group.add_argument(
        "--global-batch-size", type=int, help="sequences of a step over all ranks; default: one micro-batch a rank"
    )
    group.add_argument("--train-iters", type=int, default=50, help="optimizer steps in all")
    group.add_argument("--exit-interval", type=int, help="stop after this many steps in all, as if interrupted")
    group.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    group.add_argument("--min-lr", type=float, default=3e-4, help="learning rate at the last step")
    group.add_argument("--lr-warmup-iters", type=int, default=10, help="steps of linear warm-up; a cosine follows")
    group.add_argument("--weight-decay", type=float, default=0.1, help="of matrices; norms and biases have none")
    group.add_argument("--adam-beta1", type=float, default=0.9)
    group.add_argument("--adam-beta2", type=float, default=0.95)
    group.add_argument("--adam-eps", type=float, default=1e-8)
    group.add_argument("--clip-grad", type=float, default=1.0, help="largest gradient norm")
    group.add_argument("--seed", type=int, default=1234, help="of initial weights and of the order of the data")
    group.add_argument("--eval-interval", type=int, default=25, help="steps between two looks at the held-out text")
    group.add_argument("--eval-iters", type=int, default=4, help="micro-batches of a rank in one look")
    group.add_argument("--save", type=Path, help="folder for checkpoints")
    group.add_argument(
        "--save-interval", type=int, default=50, help="steps between two checkpoints; the last step is saved too"
    )
    group.add_argument("--load", type=Path, help="go on from the latest checkpoint in this folder, if there is one")
    group.add_argument("--output-dir", type=Path, help="folder for metrics.jsonl, pictures and the TensorBoard log")
    group.add_argument("--sample-bytes", type=int, default=160, help="length of the text sampled at the end; 0: none")
    return parser


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for training flags out of range."""
    for name in ("seq_length", "micro_batch_size", "train_iters", "eval_interval", "eval_iters", "save_interval"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} ({getattr(args, name)}) must be at least 1.")
    if args.params_dtype == torch.float16:
        raise ValueError("--fp16 needs loss scaling, which this script does not have; use --bf16 or fp32.")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this torch sees no GPU; use --device cpu.")


def start_process_group(args: argparse.Namespace) -> None:
    """Join the other ranks if torchrun started this process; else stay alone."""
    if "WORLD_SIZE" not in os.environ:
        return
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(minutes=args.distributed_timeout_minutes)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=timeout)


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
    """Return AdamW; expert parameters (DTensors when sharded) stand in groups of their own."""
    param_groups = []
    for parameters in (dense_parameters(model), expert_parameters(model)):
        matrices = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        param_groups += [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
    param_groups = [group for group in param_groups if group["params"]]
    return torch.optim.AdamW(param_groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps)


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then a cosine to min_lr."""
    if step < args.lr_warmup_iters:
        return args.lr * (step + 1) / args.lr_warmup_iters
    done = (step - args.lr_warmup_iters) / max(1, args.train_iters - args.lr_warmup_iters)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(1.0, done)))


class Trainer:
    """The state of a run: model, optimizer, data and where it writes."""

    def __init__(self, args: argparse.Namespace, config: TransformerConfig, groups: ProcessGroups) -> None:
        self.args, self.groups = args, groups
        self.rank, self.num_ranks = groups.dp.rank(), groups.dp.size()
        self.device = torch.device(args.device)
        self.num_microbatches = num_microbatches(args, groups)
        files, num_binary = (default_text_files(), 0) if not args.data_path else find_text_files(args.data_path)
        self.corpus = ByteCorpus.from_files(files)
        self.train_data = SequenceSampler(self.corpus.train, args.seq_length, args.micro_batch_size, args.seed)
        self.heldout_data = SequenceSampler(self.corpus.valid, args.seq_length, args.micro_batch_size, args.seed)
        torch.manual_seed(args.seed)
        self.model = MoEGPT(config, groups).to(self.device)
        self.optimizer = build_optimizer(self.model, args)
        self.step = self._resume()
        self.say(
            f"{len(files)} text files ({num_binary} binary files left out), {len(self.corpus.train):,} bytes to train"
            f" on, {len(self.corpus.valid):,} held out; {self.num_ranks} ranks, {self.num_microbatches} micro-batches"
            f" of {args.micro_batch_size} x {args.seq_length} bytes a step"
        )
        layers = self.model.moe_layers()
        self.say(next(iter(layers.values())).describe() if layers else "no MoE layer: every block is dense")
        self.log = None
        if args.output_dir and self.rank == 0:
            self.log = RunLog(args.output_dir, use_tensorboard=True)
            self.log.truncate_after(self.step)

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def _resume(self) -> int:
        """Load the latest checkpoint of --load and return its step; 0 if there is none."""
        if self.args.load is None:
            return 0
        if latest_step(self.args.load) is None:
            self.say(f"no checkpoint in {self.args.load}: starting from scratch")
            return 0
        loaded = load_checkpoint(self.args.load, self.model, self.optimizer)
        self.say(f"resumed from {loaded.path} at step {loaded.step}")
        return loaded.step

    def train_step(self) -> dict:
        """Run one optimizer step and return its record."""
        started, args = time.perf_counter(), self.args
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(args, self.step)
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_step in range(self.num_microbatches):
            inputs, targets = self.train_data.batch(self.step, micro_step, self.rank, self.num_ranks)
            loss = self.model(inputs.to(self.device), targets.to(self.device))  # [B, S], [B, S] -> []
            loss.backward()
            loss_sum += loss.detach()
        finalize_gradients(self.model, self.groups, self.num_microbatches)
        grad_norm = clip_grad_norm(self.model, args.clip_grad, self.groups)
        self.optimizer.step()
        self.step += 1
        metrics = collect_metrics(self.model, self.groups)
        mean_loss = sum_over_world(loss_sum, self.groups).item() / (self.num_ranks * self.num_microbatches)
        num_tokens = self.num_ranks * self.num_microbatches * args.micro_batch_size * args.seq_length
        return {
            "step": self.step,
            "loss": mean_loss,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": grad_norm.item(),
            "tokens_per_s": num_tokens / (time.perf_counter() - started),
            "load_imbalance": metrics.load_imbalance.tolist(),
            "expert_load": metrics.tokens_per_expert.tolist(),
            "aux_loss": metrics.aux_loss.mean().item() if len(metrics.layer_names) else 0.0,
            "z_loss": metrics.z_loss.mean().item() if len(metrics.layer_names) else 0.0,
        }

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the held-out text in nats per byte, the same windows at every call."""
        self.model.eval()
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        for inputs, targets in self.heldout_data.heldout_batches(
            self.args.eval_iters * self.num_ranks, self.rank, self.num_ranks
        ):
            losses += self.model(inputs.to(self.device), targets.to(self.device))
        self.model.train()
        return sum_over_world(losses, self.groups).item() / (self.args.eval_iters * self.num_ranks)

    @torch.no_grad()
    def sample(self, prompt: bytes, num_bytes: int, generator: torch.Generator) -> str:
        """Return the prompt and num_bytes sampled after it; every rank takes part and gets the same text."""
        text = list(prompt)
        self.model.eval()
        for _ in range(num_bytes):
            window = torch.tensor([text[-self.args.seq_length :]], device=self.device)  # [1, S]
            scores = self.model(window)[0, -1].float().cpu() / 0.8  # [V]
            text.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
        self.model.train()
        return bytes(text).decode("utf-8", errors="replace")

    def train(self) -> None:
        """Run to the last step; log, evaluate and save on the way; report at the end."""
        args, first_step, started = self.args, self.step, time.perf_counter()
        last_step = min(args.train_iters, args.exit_interval or args.train_iters)
        bar = ProgressBar(args.train_iters, first_step) if self.rank == 0 else None
        record: dict = {}
        while self.step < last_step:
            record = self.train_step()
            if self.step % args.eval_interval == 0 or self.step == last_step:
                record["eval_loss"] = self.evaluate()
            if bar:
                imbalance = max(record["load_imbalance"], default=1.0)
                eval_loss = record.get("eval_loss")
                bar.update(
                    self.step,
                    loss=record["loss"],
                    tokens_per_s=record["tokens_per_s"],
                    imbalance=imbalance,
                    eval_loss=eval_loss,
                )
            if self.log:
                self.log.write(record)
            if args.save and (self.step % args.save_interval == 0 or self.step == last_step):
                save_checkpoint(args.save, self.step, self.model, self.optimizer, extra={"loss": record["loss"]})
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
        batch = args.micro_batch_size * self.num_ranks * self.num_microbatches
        print(
            summary_table(
                num_steps=num_steps,
                num_tokens=num_steps * batch * args.seq_length,
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
            draw_loss(read_metrics(self.log.path), folder / "loss.png", unigram_nats)
            files.append(folder / "loss.png")
            draw_expert_load(read_metrics(self.log.path), folder / "expert_load.png")
            files.append(folder / "expert_load.png")
        except ImportError as error:
            print(f"no pictures: {error}")
        return files


def main() -> None:
    """Read the flags, join the ranks, train."""
    args = build_parser().parse_args()
    rank = int(os.environ.get("RANK", "0"))
    trainer = None
    try:
        check_arguments(args)
        config = config_from_args(args, TransformerConfig)
        start_process_group(args)
        trainer = Trainer(args, config, groups_from_args(args, args.device))
        trainer.train()
    except (ValueError, FileNotFoundError) as error:
        if rank == 0:
            print(f"pretrain_gpt.py: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except (dist.DistError, RuntimeError) as error:
        step = trainer.step if trainer else 0
        print(
            f"\nrank {rank}: stopped in step {step + 1}: {error}\nIf the message speaks of a closed connection or a"
            " timeout, another rank has died or hung: torchrun's summary names it. The same command with --load"
            f" {args.save or 'FOLDER'} goes on from the last checkpoint.",
            file=sys.stderr,
            flush=True,
        )
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
