"""`eval` and `export`: what a trained drafter is worth with its target, and its way out of here.

Each prompt is decoded by the pair and, as yardstick, by the target alone with the same cache and
limits, once for all block sizes. Whether greedy answers are the target's own, `lossless.py` tells.
Cost: one sequence at a time, and plain decoding takes most of it: the acceptance length times the other.
Without it there is no speed to tell, and greedy answers are decoded in batches where the target allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from protocol.errors import CheckpointError, ConfigError, ModelError
from services.config.schema import Config
from services.data.convert import read_template
from services.dflash.checkpoint import is_training_checkpoint, read_checkpoint
from services.dflash.drafter import Drafter
from services.dflash.drafter_config import DrafterConfig
from services.dflash.eval_result import EvalResult
from services.dflash.export import export_drafter, load_weights, load_zlab
from services.dflash.export_check import check_export
from services.dflash.lossless import compare, look_again
from services.dflash.prompts import Prompt, load_prompts
from services.dflash.sampling import Sampling
from services.dflash.speculate import Generation, decode_plainly, speculate
from services.dflash.speculate_batch import can_batch, speculate_batch
from services.dflash.target_model import Target, load_target, load_tokenizer

Progress = Callable[[int, int], None]


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] | None = None,
    block_size: int | None = None,
    sampling: Sampling | None = None,
    plain: bool = True,
    known_plain: Sequence[Generation] = (),
    batch: int = 1,
    progress: Progress | None = None,
) -> EvalResult:
    """Decodes `prompts` with the pair and, if `plain`, without it too. Greedy: checked to be lossless.

    `known_plain`: the `plain` of an earlier result with the same target, prompts, limits and sampling, which
    is then not decoded again. `batch`: prompts decoded at a time, which tells no speed; one by one with
    `plain`, sampled, or with a target that cannot. `stop_ids` None takes the target's. `progress` (prompts
    done, of all) may be called several times for one prompt; what it raises ends the evaluation. Raises
    `ModelError` if drafter and target do not fit, `ConfigError` for a block larger than the drafter's.
    """
    check_fit(drafter.config, target)
    if block_size is not None:
        _check_block(block_size, drafter.config)
    drafter = drafter.to(target.device, target.dtype).eval()
    stops = tuple(target.stop_ids if stop_ids is None else stop_ids)
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stops}
    alone: list[Generation] = list(known_plain) if plain else []
    if batch > 1 and not plain and sampling is None and can_batch(target):
        drafted = speculate_batch(
            target, drafter, [prompt.ids for prompt in prompts],
            block_size=block_size, rows=batch, progress=progress, **limits,
        )  # fmt: skip
    else:
        drafted, decoded = _one_by_one(
            target, drafter, prompts, limits,
            block_size=block_size, sampling=sampling, plain=plain and not known_plain, progress=progress,
        )  # fmt: skip
        alone += decoded
    ties: list[int] = []
    differing: list[int] = []
    if sampling is None:
        ties, differing = look_again(
            target, prompts, drafted, max_new_tokens, stops, None if plain else progress
        )
        if plain:
            ties, parting = compare(target, prompts, drafted, alone)
            differing = sorted({*differing, *parting})
    return EvalResult(
        domains=tuple(prompt.domain for prompt in prompts),
        drafted=tuple(drafted),
        plain=tuple(alone),
        ties=tuple(ties),
        differing=tuple(differing),
        block_size=block_size or drafter.config.block_size,
        max_new_tokens=max_new_tokens,
        stop_ids=stops,
        sampling=sampling,
    )


def _one_by_one(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    limits: dict[str, Any],
    *,
    block_size: int | None,
    sampling: Sampling | None,
    plain: bool,
    progress: Progress | None,
) -> tuple[list[Generation], list[Generation]]:
    """(with the drafter, without it), the second empty unless `plain`. A sampled prompt has its own seed."""
    drafted: list[Generation] = []
    alone: list[Generation] = []
    for done, prompt in enumerate(prompts, start=1):
        if sampling is not None:
            limits = limits | {"sampling": replace(sampling, seed=sampling.seed + prompt.number)}
        drafted.append(speculate(target, drafter, prompt.ids, block_size=block_size, **limits))
        if plain:
            alone.append(decode_plainly(target, prompt.ids, **limits))
        if progress is not None:
            progress(done, len(prompts))
    return drafted, alone


def run_evals(
    checkpoint: Path,
    config: Config | None = None,
    *,
    target: str = "",
    prompts: Path | None = None,
    max_new_tokens: int = 0,
    limit: int = 0,
    device: str = "cpu",
    dtype: str = "",
    block_sizes: Sequence[int] = (),
    sampling: Sampling | None = None,
    plain: bool = True,
    progress: Progress | None = None,
    part: tuple[int, int] = (0, 1),
) -> list[EvalResult]:
    """`draftmill eval`: a training checkpoint or z-lab folder with its target on held-out prompts.

    One result for each of `block_sizes` (none: the drafter's own). What is left out is taken from `config`
    (`[model]`, `[eval]`). `part` (i, n): only every n-th prompt, from the i-th. Raises `FatalError`s that
    name the option.
    """
    path = target or (config.model.path if config else "")
    file = prompts or (Path(config.eval.prompts) if config and config.eval.prompts else None)
    if not path or file is None:
        missing = "the target's path (model.path)" if not path else "held-out prompts (eval.prompts)"
        raise ConfigError(f"eval: needs {missing}; give it or a configuration that has it")
    drafter = load_drafter(checkpoint)
    sizes = list(block_sizes) or [drafter.config.block_size]
    for size in sizes:
        _check_block(size, drafter.config)
    limit = limit or (config.eval.limit if config else 0)
    first, step = part
    held_out = load_prompts(file, load_tokenizer(path), limit=limit, **template_options(config))[first::step]
    loaded = load_target(
        path,
        dtype=dtype or (config.model.dtype if config else "float32"),
        device=device,
        attention=config.model.attention if config else "sdpa",
    )
    results: list[EvalResult] = []
    for number, size in enumerate(sizes):
        results.append(
            evaluate(
                loaded,
                drafter,
                held_out,
                max_new_tokens=max_new_tokens or (config.eval.max_new_tokens if config else 128),
                block_size=size,
                sampling=sampling,
                plain=plain,
                known_plain=results[0].plain if results else (),
                batch=config.eval.batch if config else 1,
                progress=_part(progress, number, len(sizes)),
            )
        )
    return results


def run_eval(checkpoint: Path, config: Config | None = None, **options: Any) -> EvalResult:
    """`run_evals` with the drafter's own block size."""
    return run_evals(checkpoint, config, **options)[0]


def load_held_out(config: Config) -> list[Prompt]:
    """The prompts of `eval.prompts`. Raises `DataError`, `ModelError` for the tokenizer."""
    return load_prompts(
        Path(config.eval.prompts),
        load_tokenizer(config.model.path),
        limit=config.eval.limit,
        **template_options(config),
    )


def template_options(config: Config | None) -> dict[str, Any]:
    """What the chat template is asked for, thinking under both names that templates use, and the template of
    `data.chat_template` where that is named; nothing without `config`. Raises `ModelError`: no such file.
    """
    if config is None:
        return {}
    asked = config.eval.thinking
    thinking = config.data.thinking == "train" if asked == "data" else asked == "on"
    own = read_template(config.data.chat_template)
    return {"enable_thinking": thinking, "thinking": thinking} | ({"chat_template": own} if own else {})


def _part(progress: Progress | None, number: int, parts: int) -> Progress | None:
    """Progress of part `number` of several equal ones."""
    if progress is None:
        return None
    return lambda done, of: progress(number * of + done, parts * of)


def _check_block(size: int, config: DrafterConfig) -> None:
    if not 2 <= size <= config.block_size:
        raise ConfigError(
            f"block size {size}: this drafter was trained for blocks of {config.block_size}; "
            f"choose 2 to {config.block_size}"
        )


def run_export(checkpoint: Path, out: Path, *, dtype: str = "bfloat16") -> dict[str, Any]:
    """`draftmill export`: writes z-lab's layout and checks it; returns what `check_export` found.

    Raises `CheckpointError`; an export that fails its check is left in place to be looked at.
    """
    drafter = load_drafter(checkpoint)
    export_drafter(drafter, out, dtype=dtype)
    return check_export(out, drafter, dtype=dtype)


def load_drafter(checkpoint: Path) -> Drafter:
    """Of a training checkpoint or z-lab's layout, float32 on the CPU. Raises `CheckpointError`."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"checkpoint {checkpoint}: no such folder; name a training checkpoint (RUN/checkpoints/...), "
            "an export, or RUN/best, which an evaluator makes"
        )
    checkpoint = checkpoint.resolve()  # `best` is a link that may be replaced while its files are read
    if not is_training_checkpoint(checkpoint):
        return load_zlab(checkpoint)
    saved = read_checkpoint(checkpoint, None, optimizer=False)
    drafter = Drafter(saved.drafter, seed=None)
    load_weights(drafter, saved.weights, str(checkpoint))
    return drafter


def check_fit(config: DrafterConfig, target: Target) -> None:
    """Raises `ModelError` unless the drafter was made for a target of this shape."""
    pairs = {
        "hidden_size": (config.hidden_size, target.config.hidden_size),
        "layers": (config.num_target_layers, target.config.num_hidden_layers),
        "embedding rows": (config.vocab_size, target.embed_weight_VH.shape[0]),
    }
    wrong = [f"{name} {mine}, not {theirs}" for name, (mine, theirs) in pairs.items() if mine != theirs]
    if wrong:
        raise ModelError(
            f"drafter: made for a target with {'; '.join(wrong)}; evaluate it with its own target"
        )
