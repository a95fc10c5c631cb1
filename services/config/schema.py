"""Every option of every role, in one frozen tree. No torch, no environment, no files: only the shape.

`target.postprocess_depth` is `[target] postprocess_depth` in TOML, `DFLASH_TARGET_POSTPROCESS_DEPTH`
in the environment and `--target.postprocess-depth` on the command line. Options marked with
`training()` change the weights that come out; they make the run's fingerprint, and a run does not
resume when one of them changed. All others may change at any restart of any role. Where model and data
lie is not among them: their contents are in the fingerprint, so that a run can be moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(gt=0.0)]


def training(default: Any = ..., *, description: str) -> Any:
    """An option that is part of the run's fingerprint."""
    return Field(default, description=description, json_schema_extra={"training": True})


def option(default: Any = ..., *, description: str) -> Any:
    """An option that leaves the training result alone."""
    return Field(default, description=description, json_schema_extra={"training": False})


class Options(BaseModel):
    """Frozen; unknown names are errors."""

    # numbers become text so that `gpus = [0, 1]` is what it says
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, coerce_numbers_to_str=True)


class Run(Options):
    dir: Path = option(Path("runs/default"), description="ledger, checkpoints, logs and summary of the run")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = training(
        0, description="everything random is drawn from it"
    )
    epochs: Positive = training(1, description="passes over the dataset")
    max_failed_ratio: Ratio = option(
        0.01, description="the run stops when more samples than this share failed"
    )
    compile_cache: Path = option(
        Path("~/.cache/draftmill/compiled"),
        description="compiled kernels, which a restarted role takes from here (as TORCHINDUCTOR_CACHE_DIR)",
    )


class Model(Options):
    path: str = option(description="target model: a folder with config.json and safetensors, or a hub id")
    dtype: Literal["float32", "bfloat16", "float16"] = training(
        "bfloat16", description="the target's compute type"
    )
    attention: Literal["sdpa", "eager", "flash_attention_2"] = training(
        "sdpa", description="the target's attention"
    )


class Data(Options):
    path: Path = option(description="prepared dataset (what `draftmill prepare` writes)")
    later: tuple[Annotated[str, Field(pattern=r"^[1-9][0-9]*:.+$")], ...] = option(
        (),
        description="datasets that take over, as EPOCH:PATH; epoch 0 has data.path (see `draftmill extend`)",
    )
    max_length: Positive = option(3072, description="tokens a sample may have, in `prepare`")
    on_bad_line: Literal["refuse", "skip"] = option("refuse", description="bad input lines in `prepare`")
    on_too_long: Literal["refuse", "skip", "truncate"] = option(
        "refuse", description="longer samples in `prepare`"
    )
    thinking: Literal["train", "strip"] = option(
        "train", description="thinking blocks of answers, as the target will be served, in `prepare`"
    )
    chat_template: str = option("", description="template file for `prepare`; empty: the tokenizer's own")
    workers: Annotated[int, Field(ge=0)] = option(0, description="processes of `prepare` beside its own")
    validation_ratio: Ratio = option(
        0.0, description="share of prompts that `prepare` holds out from training"
    )
    weights: tuple[Annotated[float, Field(ge=0.0)], ...] = option(
        (), description="how often samples of each input count, in `prepare`; empty: once"
    )

    @property
    def takeovers(self) -> tuple[tuple[int, Path], ...]:
        """`later`, taken apart: (epoch, path)."""
        parts = [entry.partition(":") for entry in self.later]
        return tuple((int(epoch), Path(path)) for epoch, _, path in parts)


class Plan(Options):
    token_budget: Positive = training(4096, description="real tokens a pack comes near to, and never exceeds")
    bucket_edges: tuple[Positive, ...] = training(
        (128, 256, 512, 1024, 2048, 4096), description="padded lengths of the target's forward, ascending"
    )
    packs_per_step: Positive = training(4, description="packs of one optimizer step, over all drafters")
    order: Literal["plan", "arrival"] = training(
        "plan", description="plan: reproducible; arrival: whatever is ready"
    )
    min_ready: Annotated[int, Field(ge=0)] = option(
        10, description="arrival: ready packs before a step is filled"
    )


class Target(Options):
    count: Positive = option(1, description="target servers on this host")
    gpus: tuple[str, ...] = option(
        (), description="device of each target, e.g. 0,1,2; empty: cpu or the first GPUs"
    )
    slots: Positive = option(8, description="packs a target's arena holds")
    assign_ahead: Annotated[int, Field(ge=0)] = option(
        2, description="batches queued behind the one computed"
    )
    postprocess_depth: Positive = option(1, description="packs between forward and ready inside a target")
    split_fc_layers: bool = option(
        False, description="tapped layers as separate sections, joined by the drafter"
    )
    threads: Annotated[int, Field(ge=0)] = option(
        0, description="CPU threads of one target; 0: torch's default"
    )
    compile: bool = option(False, description="torch.compile the forward")
    warm_up: bool = option(True, description="run every bucket once before the first lease")
    self_check: bool = option(True, description="check taps, logits and ragged batches at start")


class Drafter(Options):
    count: Positive = option(1, description="drafter trainers on this host")
    gpus: tuple[str, ...] = option(
        (), description="device of each drafter, e.g. 5,6,7; empty: cpu or the last GPUs"
    )
    elastic: Literal["shrink", "wait"] = option(
        "shrink", description="go on without a dead drafter, or wait for it"
    )
    threads: Annotated[int, Field(ge=0)] = option(
        0, description="CPU threads of one drafter; 0: torch's default"
    )
    prefetch_packs: Annotated[int, Field(ge=0)] = option(
        2, description="packs a drafter holds beyond its step"
    )
    layers: Positive = training(5, description="drafter layers")
    taps: Positive = training(5, description="tapped target layers, spread evenly")
    target_layer_ids: tuple[int, ...] = training(
        (), description="tapped layers by id; empty: spread `taps` of them"
    )
    block_size: Annotated[int, Field(ge=2)] = training(
        16, description="tokens of a block, the clean one included"
    )
    intermediate_size: Annotated[int, Field(ge=0)] = training(0, description="MLP width; 0: the target's")
    heads: Annotated[int, Field(ge=0)] = training(0, description="attention heads; 0: the target's")
    kv_heads: Annotated[int, Field(ge=0)] = training(0, description="key-value heads; 0: the target's")
    head_dim: Annotated[int, Field(ge=0)] = training(0, description="dimensions of a head; 0: the target's")
    sliding_layers: Annotated[int, Field(ge=0)] = training(
        0, description="leading layers with a sliding window"
    )
    sliding_window: Positive = training(2048, description="window of the sliding layers, in tokens")
    mask_token_id: Annotated[int, Field(ge=-1)] = training(
        -1, description="embedding row of the mask; -1: choose one"
    )
    init_from: str = training(
        "", description="checkpoint in z-lab's layout to start from; empty: from the seed"
    )
    dtype: Literal["float32", "bfloat16"] = training(
        "bfloat16", description="compute type; masters are float32"
    )
    attention: Literal["auto", "flex", "dense"] = training(
        "auto",
        description="auto: flex on a GPU, dense on a CPU; dense: on a CPU document by document, on a GPU one "
        "full mask over all rows and keys, quadratic in the anchors",
    )
    deterministic: bool = training(False, description="deterministic kernels only")


class Recipe(Options):
    lr: Annotated[float, Field(gt=0.0)] = training(6e-4, description="peak learning rate")
    warmup_ratio: Ratio = training(0.04, description="share of all steps that warm up linearly")
    min_lr_ratio: Ratio = training(0.0, description="where the cosine ends, as a share of lr")
    weight_decay: Annotated[float, Field(ge=0.0)] = training(0.01, description="AdamW")
    beta1: Ratio = training(0.9, description="AdamW")
    beta2: Ratio = training(0.999, description="AdamW")
    eps: Annotated[float, Field(gt=0.0)] = training(1e-8, description="AdamW")
    grad_clip: Annotated[float, Field(ge=0.0)] = training(1.0, description="gradient norm limit; 0: none")
    anchors_per_pack: Positive = training(
        512, description="blocks drawn from a pack, shared out by supervised tokens"
    )
    anchor_draws: Positive = training(
        1, description="anchor sets of one shipped pack, summed into the same step"
    )
    loss: Literal["ce", "kl", "dpace"] = training(
        "ce", description="ce: the paper's; kl ships the last hidden state"
    )
    labels: Literal["data", "target"] = training(
        "data",
        description="what a slot is to foretell: the text's own token, or the one that the target finds best "
        "after the text before it (ships the last hidden state; for sampled or foreign answers; with kl, "
        "which learns the target's distribution, it says what counts as a hit)",
    )
    gamma: Annotated[float, Field(ge=0.0)] = training(
        0.0, description="decay of the position weights; 0: by block"
    )
    noise: Literal["none", "uniform", "normal"] = training("none", description="noise on the features")
    noise_scale: Annotated[float, Field(ge=0.0)] = training(
        0.0, description="half width, or deviation, of the noise"
    )

    @property
    def needs_last_hidden(self) -> bool:
        """Whether drafters need what the target's LM head sees, beside the features."""
        return self.loss == "kl" or self.labels == "target"


class Arena(Options):
    kind: Literal["auto", "shm", "pinned", "cuda_ipc"] = option(
        "auto", description="where hidden states wait"
    )
    dir: Path = option(Path("/dev/shm/draftmill"), description="tmpfs folder of arenas, locks and sockets")  # noqa: S108
    checksum: Literal["off", "sampled", "always"] = option("sampled", description="checksums over payloads")


class Coordinator(Options):
    endpoint: str = option(
        "", description="control plane, ipc:// or tcp://; empty: ipc:// in the arena folder"
    )
    insecure: bool = option(False, description="allow tcp:// without CURVE keys")
    keys: str = option("", description="folder of CURVE keys for tcp:// (see `draftmill keys`); empty: none")
    http_host: str = option("127.0.0.1", description="address of /metrics, /healthz and /status")
    http_port: Annotated[int, Field(ge=0, le=65535)] = option(9440, description="port of it; 0: any free one")
    in_flight_cap_packs: Annotated[int, Field(ge=0)] = option(
        0, description="packs between order and commit; 0: none"
    )
    in_flight_cap_bytes: Annotated[int, Field(ge=0)] = option(
        0, description="payload bytes in flight; 0: none"
    )
    heartbeat_s: Seconds = option(1.0, description="roles and coordinator repeat their level this often")
    silence_s: Seconds = option(30.0, description="a member silent for longer is fenced")
    overdue_s: Seconds = option(120.0, description="the first batch of the plan goes elsewhere after this")
    rejoin_s: Seconds = option(20.0, description="wait of a restarted coordinator for the members it knew")


class Checkpoint(Options):
    every_steps: Positive = option(100, description="steps between checkpoints")
    keep: Positive = option(3, description="recorded checkpoints kept, beside the initial weights")
    upload: str = option("", description="fsspec URL that recorded checkpoints are copied to; empty: none")


class Eval(Options):
    prompts: str = option("", description="JSONL of held-out prompts; empty: no evaluation")
    max_new_tokens: Positive = option(128, description="answer length limit")
    limit: Annotated[int, Field(ge=0)] = option(0, description="prompts used; 0: all")
    batch: Positive = option(
        32, description="prompts decoded at a time where no speed is told: by the evaluator, eval --no-plain"
    )
    thinking: Literal["data", "on", "off"] = option(
        "data", description="what the chat template is asked for; data: what data.thinking says"
    )
    validation_limit: Annotated[int, Field(ge=0)] = option(
        256, description="held-out samples of the dataset that the evaluator uses; 0: all"
    )


class Evaluator(Options):
    count: Annotated[int, Field(ge=0, le=1)] = option(
        0, description="1: `up` starts an evaluator of recorded checkpoints"
    )
    gpu: str = option(
        "", description="its device, e.g. 7 or cpu; empty: the first GPU that no role has, cpu without GPUs"
    )
    share: Annotated[float, Field(gt=0.0, le=1.0)] = option(
        1.0, description="share of its time that it may work, to leave a shared device to others"
    )
    threads: Annotated[int, Field(ge=0)] = option(0, description="its CPU threads; 0: torch's default")


class Watch(Options):
    stuck_s: Seconds = option(300.0, description="a role without progress for this long exits")
    restart_delay_s: Seconds = option(
        0.5, description="first wait before `up` restarts a role; doubles to 30 s"
    )
    stop_s: Seconds = option(
        60.0,
        description="a clean stop may take this long before `up` kills what is left; half of it is waited "
        "for a checkpoint that cannot be written",
    )
    give_up_after: Positive = option(5, description="deaths in a row without progress before `up` gives up")
    linger: bool = option(
        False, description="after the run's end stay up, idle, until stopped (where exits mean restarts)"
    )


class Log(Options):
    format: Literal["text", "json"] = option("text", description="one line an event: key=value, or JSON")
    level: Literal["debug", "info", "warning", "error"] = option("info", description="least level written")
    sinks: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = option(
        (), description="who gets the figures of each step, beside run.dir/metrics.jsonl"
    )
    project: str = option("draftmill", description="project of the run at wandb and trackio")


class Profile(Options):
    interval_s: Annotated[float, Field(ge=0.0)] = option(
        30.0, description="seconds of a profile window; 0: none"
    )


class Config(Options):
    run: Run = Run()
    model: Model
    data: Data
    plan: Plan = Plan()
    target: Target = Target()
    drafter: Drafter = Drafter()
    recipe: Recipe = Recipe()
    arena: Arena = Arena()
    coordinator: Coordinator = Coordinator()
    checkpoint: Checkpoint = Checkpoint()
    eval: Eval = Eval()
    evaluator: Evaluator = Evaluator()
    watch: Watch = Watch()
    log: Log = Log()
    profile: Profile = Profile()
