"""A plain training loop around speculators 0.9.0's DFlash model: the drafter that ours is measured against.

    python benchmarks/peers/speculators_loop.py --model /models/X --data data/mine --steps 800 --out peer
    draftmill eval peer --target /models/X --prompts held-out.jsonl

One process, one device: the target's forward, the peer's model, loss and optimizer, then the next pack; one
line every 50 steps, one line of JSON last, an export in z-lab's layout. `--seconds` or SIGTERM end the
training early, but not the export; `steps` says how many were taken.

What both trainers share: the samples of each step (`Schedule`), the target's forward and hidden states
(`TapCapture`), the drafter's shape (`derive`), gamma, learning rate, warm-up, cosine, decay, clipping.
What is the peer's own, as its `Trainer` and collation do it: initial weights, zero padding of each pack to
the token budget, float32 masters under autocast, 512 anchors of a padded pack drawn uniformly from supervised
tokens outside of its last block, labels that are the target's own best tokens (its norm and head on the last
layer's output, not the data's tokens), the mean loss of a pack over slots, AdamW on norm weights too.

Where this differs from what its command line would do by default, and why:
- `--recipe paper` has AdamW, cosine and decaying weights. Its defaults (Muon with a rate of 0.001, a linear
  schedule, D-PACE weights) are `--recipe own`. Full attention replaces its sliding window: the same shape.
- Packs of a step are averaged as its data-parallel ranks average; it would need one GPU for each.
- Attention is its "sdpa" and nothing is compiled, since its compilation takes minutes (238 s were measured
  for an 8B shape). `--compile` has its default: compiled, flex attention. The numbers agree up to rounding,
  but figures of speed are the peer's only with `--compile` and a training of many minutes.
- Its eager loss stands for its fused one, which does not compile with Triton 3.6: equal, more memory.
Tap ids are z-lab's here and in the export; its own count the embedding as 0 and are one larger.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from speculators.models.dflash import DFlashDraftModel
from speculators.train.optimizers import build_optimizers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from transformers import Qwen3Config

from services.config.schema import Config, Plan
from services.data.plan import Schedule, padded_length
from services.data.training_data import TrainingData
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig, derive
from services.dflash.export import export_drafter, load_weights
from services.dflash.export_check import check_export
from services.dflash.loss import default_gamma
from services.dflash.taps import PackBuffer, TapCapture, packed_rows
from services.dflash.target_model import Target, load_stop_ids, load_target, load_tokenizer

NUMBERS = {
    "packs-per-step": 4, "token-budget": 4096, "anchors": 512, "layers": 5, "block-size": 16,
    "mask-token-id": -1, "lr": 6e-4, "warmup-ratio": 0.04, "gamma": 0.0, "seed": 0, "seconds": 1e9,
}  # fmt: skip
SHAPE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
REPORT_STEPS = 50
KERNELS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # those that take any mask
OWN: dict[str, Any] = {
    "optimizer": "muon", "lr": 1e-3, "muon_lr": 1e-3, "muon_momentum": 0.95, "muon_weight_decay": 0.1,
    "muon_ns_steps": 5, "muon_adjust_lr_fn": "match_rms_adamw",
}  # fmt: skip
FIGURES = {"loss": "loss", "full_acc": "accuracy", "eal": "acceptance"}  # its names, ours
FROZEN = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}


class Packs:
    """The packs of each step, as the peer's collation would hand them to its model."""

    def __init__(self, config: Config, target: Target, taps: tuple[int, ...]) -> None:
        self.data = TrainingData.open(config.data)
        self.schedule = Schedule(config, self.data)
        self.budget, self.edges = config.plan.token_budget, config.plan.bucket_edges
        self.device, self.width = target.device, len(taps) * target.config.hidden_size
        last = target.config.num_hidden_layers - 1  # its output before the final norm, which the peer applies
        self.capture = TapCapture(target, (*taps, last))
        self.buffer = PackBuffer.allocate(
            self.budget, len(taps) + 1, target.config.hidden_size,
            split=False, last_hidden=False, dtype=target.dtype, device=target.device,
        )  # fmt: skip
        self.tokens = self.count = 0

    def of_step(self, step: int) -> list[tuple[int, ...]]:
        epoch, positions = self.schedule.locate(step)
        self.dataset = self.data.of(epoch)
        return [self.schedule.epoch(epoch).batches[position] for position in positions]

    def read(self, rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
        samples = [self.dataset.sample(row) for row in rows]
        ids, masks = (
            [torch.tensor(part, dtype=torch.int64) for part in parts] for parts in zip(*samples, strict=True)
        )
        lengths = [len(part) for part in ids]
        total, padded = sum(lengths), padded_length(max(lengths), self.edges)
        self.tokens, self.count = self.tokens + total, self.count + 1
        documents = [torch.full_like(part, number) for number, part in enumerate(ids)]
        positions = [torch.arange(length) for length in lengths]
        batch = torch.stack([pad(part, (0, padded - len(part))) for part in ids])
        self.capture.run(batch.to(self.device), packed_rows(lengths, padded).to(self.device), self.buffer)
        hidden = self.buffer.features
        assert isinstance(hidden, torch.Tensor)
        hidden[total:] = 0
        return {
            "hidden_states": hidden[None, :, : self.width].contiguous(),
            "verifier_last_hidden_states": hidden[None, :, self.width :].contiguous(),
            "input_ids": self._row(ids), "loss_mask": self._row(masks),
            "position_ids": self._row(positions), "document_ids": self._row(documents, filler=-1),
        }  # fmt: skip

    def _row(self, parts: list[torch.Tensor], filler: int = 0) -> torch.Tensor:
        flat = torch.cat(parts)
        return pad(flat, (0, self.budget - flat.numel()), value=filler)[None].to(self.device)


def build_peer(shape: DrafterConfig, args: argparse.Namespace) -> Any:
    """Its model with the target's embedding, head and final norm, float32."""
    if (shape.input_embedding_scale, shape.output_multiplier, shape.final_logit_softcapping) != (1, 1, 0):
        raise SystemExit(f"{args.model}: it scales embeddings or logits, which speculators does not")
    layers = Qwen3Config(
        **{name: getattr(shape, name) for name in SHAPE}, layer_types=list(shape.layer_types),
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}, tie_word_embeddings=False,
    )  # fmt: skip
    model = DFlashDraftModel.from_training_args(
        layers, draft_vocab_size=shape.vocab_size, block_size=shape.block_size,
        mask_token_id=shape.mask_token_id, target_layer_ids=[tap + 1 for tap in shape.target_layer_ids],
        verifier_name_or_path=args.model,
        draft_attn_impl="simple_flex_attention" if args.compile else "sdpa",
    )  # fmt: skip
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == shape.parameter_count, f"{trained} parameters, not {shape.parameter_count}"
    return model.to(args.device).train()


def optimizers_of(model: Any, args: argparse.Namespace) -> tuple[list[Any], list[Any]]:
    """(optimizers, schedules)"""
    schedule: Any = transformers.get_cosine_schedule_with_warmup
    options, warmup = {"optimizer": "adamw", "lr": args.lr}, int(args.steps * args.warmup_ratio)
    if args.recipe == "own":
        options, warmup = OWN, args.steps // 100
        schedule = transformers.get_linear_schedule_with_warmup
    found = build_optimizers(model, SimpleNamespace(weight_decay=0.01, **options))
    return found, [schedule(one, warmup, args.steps) for one in found]


class Figures:
    """Sums since the last report, on the device until then, and the clock."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.began_s = time.perf_counter()
        self.seconds = self.first_step_s = 0.0
        self.first_tokens = 0
        self.latest: dict[str, float] = {}
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, metrics: dict[str, torch.Tensor]) -> None:
        for name in (f"{kind}_{part}" for kind in FIGURES for part in ("sum", "total")):
            self.sums[name] = self.sums.get(name, 0) + metrics[name].detach().float()

    def report(self, step: int, tokens: int) -> None:
        """Means since the last report; rates since the first step, which warms up."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds = time.perf_counter() - self.began_s
        if step == 1:
            self.first_step_s, self.first_tokens = self.seconds, tokens
        since_s = max(self.seconds - self.first_step_s, 1e-9)
        self.latest = {
            **{
                new: float(self.sums[f"{old}_sum"] / self.sums[f"{old}_total"])
                for old, new in FIGURES.items()
            },
            "steps_per_s": round((step - 1) / since_s, 3),
            "tokens_per_s": round((tokens - self.first_tokens) / since_s, 1),
        }
        self.sums = {}
        print(f"step {step}", self.latest, flush=True)


def train(model: Any, packs: Packs, gamma: float, args: argparse.Namespace) -> tuple[int, Figures]:
    """(steps taken, figures)"""
    call, _ = model.get_trainer_kwargs(
        loss_fn=args.loss, loss_implementation="eager", dflash_decay_gamma=gamma, max_anchors=args.anchors,
        per_position_loss_weight="dpace" if args.recipe == "own" else "fixed-exp-decay",
    )  # fmt: skip
    optimizers, schedules = optimizers_of(model, args)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    dtype, figures, step = getattr(torch, args.dtype), Figures(args.device), 0
    while step < args.steps and not stopped and time.perf_counter() - figures.began_s < args.seconds:
        rows_of_packs = packs.of_step(step)
        for rows in rows_of_packs:
            pack = packs.read(rows)
            autocast = torch.autocast(figures.device.type, dtype=dtype, enabled=dtype != torch.float32)
            with autocast, sdpa_kernel(KERNELS):
                _, loss, metrics = model(**pack, **call)
            (loss / len(rows_of_packs)).backward()
            figures.add(metrics)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in (*optimizers, *schedules):
            one.step()
        model.zero_grad(set_to_none=True)
        step += 1
        if step == 1 or step % REPORT_STEPS == 0:
            figures.report(step, packs.tokens)
    if figures.sums:
        figures.report(step, packs.tokens)
    return step, figures


def export(model: Any, shape: DrafterConfig, out: Path) -> dict[str, Any]:
    """Its names are z-lab's, but for the target's own tensors. Every weight is used and checked."""
    drafter = Drafter(shape, seed=None)
    weights = {name: tensor.float().cpu() for name, tensor in model.state_dict().items()}
    load_weights(drafter, {name: w for name, w in weights.items() if name not in FROZEN}, "of speculators")
    assert all(weight.isfinite().all() for weight in drafter.parameters()), "weights are not finite"
    export_drafter(drafter, out)
    return check_export(out, drafter)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a drafter with speculators' model in a plain loop.")
    for name in ("--model", "--data", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--steps", type=int, required=True)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--bucket-edges", type=int, nargs="+", default=list(Plan().bucket_edges))
    parser.add_argument(
        "--taps", type=int, nargs="+", default=[], help="layer ids from 0; none: five, spread"
    )
    parser.add_argument("--loss", default="ce", help="by its names: ce (what it takes for DFlash), kl_div")
    parser.add_argument("--recipe", choices=("paper", "own"), default="paper")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="flex attention; minutes of compilation")
    args = parser.parse_args()
    if Path(args.out).exists():
        parser.error(f"--out {args.out} exists already")
    return args


def main() -> None:
    args = parse()
    config = Config.model_validate({
        "model": {"path": args.model}, "data": {"path": args.data},
        "run": {"seed": args.seed, "epochs": args.steps},  # never more; each is planned when it is reached
        "plan": {name: getattr(args, name) for name in ("token_budget", "packs_per_step", "bucket_edges")},
        "drafter": {"target_layer_ids": args.taps}
        | {name: getattr(args, name) for name in ("layers", "block_size", "mask_token_id")},
    })  # fmt: skip
    if not args.compile:
        torch.compiler.set_stance("force_eager")
    target = load_target(args.model, dtype=args.dtype, device=args.device)
    tokenizer = load_tokenizer(args.model) if args.mask_token_id < 0 else None
    shape = derive(target.config, config.drafter, tokenizer, stop_ids=load_stop_ids(args.model))
    torch.manual_seed(args.seed)
    model = build_peer(shape, args)
    packs = Packs(config, target, shape.target_layer_ids)
    steps, figures = train(model, packs, args.gamma or default_gamma(args.block_size), args)
    exported = export(model, shape, Path(args.out))
    on_gpu = figures.device.type == "cuda"
    print(json.dumps({
        "peer": "speculators " + version("speculators"), "options": vars(args), "shape": shape.to_dict(),
        "parameters": shape.parameter_count, "steps": steps, "packs": packs.count, "tokens": packs.tokens,
        "seconds": round(figures.seconds, 1), "first_step_s": round(figures.first_step_s, 2),
        **figures.latest, "export": exported,
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "torch": torch.__version__, "transformers": transformers.__version__,
    }, default=str))  # fmt: skip


if __name__ == "__main__":
    main()
