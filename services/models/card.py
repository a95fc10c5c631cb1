"""The README.md of an exported drafter: what it drafts for, what it was trained on and how, what it is worth.

Everything is taken from where it was recorded (ledger, checkpoint, target's own card, evaluation), and what
was not recorded is said to be so: a card that guesses is how drafters meet the wrong target. Pure text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_SECTIONS = ("run.", "plan.", "drafter.", "recipe.", "model.")


class TargetName(NamedTuple):
    """Of the target's folder. What it does not say is empty; `license` has the hub's keys."""

    name: str
    hub_id: str
    license: Mapping[str, str]

    @property
    def license_name(self) -> str:
        return self.license.get("license_name") or self.license.get("license") or "its card names none"


class Origin(NamedTuple):
    """How the weights came to be; `identity` (of the run, services.config.fingerprint) None: not recorded."""

    step: int | None
    timeline: int | None
    sha256: str
    identity: Mapping[str, Any] | None


def render(
    *,
    fields: Mapping[str, Any],
    target: TargetName | None,
    origin: Origin,
    evaluation: Mapping[str, Any] | None,
    checked: Mapping[str, Any],
    versions: Mapping[str, str],
) -> str:
    """Markdown with the hub's front matter.

    `fields` is the export's config.json, `checked` its check's result, `evaluation` what `draftmill eval
    --json` printed.
    """
    name = target.name if target else "an unnamed target"
    tokens = fields["block_size"] - 1
    parts = [
        _front_matter(target),
        f"# DFlash drafter for {name}\n\n"
        f"A block-diffusion drafter (DFlash, arXiv 2602.06036): it proposes {tokens} tokens at once "
        f"from hidden states of {name}, which verifies them. It is of no use alone or with another "
        "target: embedding and LM head are the target's and not in these files.",
        _serving(fields, target),
        _target(fields, target, origin),
        _training(origin),
        _acceptance(evaluation),
        _checks(checked),
        "## Versions\n\n" + _table(("package", "version"), versions.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(target: TargetName | None) -> str:
    lines = ["---", "tags: [dflash, speculative-decoding, draft-model]"]
    if target and target.hub_id:
        lines.append(f"base_model: {target.hub_id}")
    lines += [f"{key}: {value}" for key, value in (target.license if target else {}).items()]
    return "\n".join([*lines, "---"])


def _serving(fields: Mapping[str, Any], target: TargetName | None) -> str:
    model = (target.hub_id or f"path/to/{target.name}") if target else "TARGET"
    size = fields["block_size"]
    return (
        "## Serve\n\n```\n"
        f"vllm serve {model} --speculative-config "
        f'\'{{"method":"dflash","model":"PATH","num_speculative_tokens":{size - 1}}}\'\n'
        f"python -m sglang.launch_server --model-path {model} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path PATH --speculative-num-draft-tokens {size} "
        f"--dtype {fields['dtype']}\n```" + (f"\n\n{warning}" if (warning := unserved(fields)) else "")
    )


def unserved(fields: Mapping[str, Any]) -> str:
    """What a server is known not to read in this config.json; empty for most."""
    scale = fields["dflash_config"].get("input_embedding_scale", 1.0)
    if scale == 1.0:
        return ""
    return (
        f"This target scales its embedding rows by {scale:g}. vLLM up to 0.33.0 feeds the drafter unscaled "
        "rows, without a word and with a low acceptance length; SGLang's Gemma 4 scales in its embedding."
    )


def _target(fields: Mapping[str, Any], target: TargetName | None, origin: Origin) -> str:
    inner = fields["dflash_config"]
    rows = [
        ("target", (target.hub_id or target.name) if target else "not named at export"),
        ("its licence, which may bind this drafter", target.license_name if target else "not known"),
        ("its fingerprint", origin.identity["model"] if origin.identity else "not recorded"),
        (
            "its layers, width, embedding rows",
            "{num_target_layers}, {hidden_size}, {vocab_size}".format(**fields),
        ),
        ("tapped layers", ", ".join(map(str, inner["target_layer_ids"]))),
        ("mask token id, block size", f"{inner['mask_token_id']}, {fields['block_size']}"),
    ]
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if key in inner:
            rows.append((key, f"{inner[key]:g}"))
    return "## Target\n\n" + _table(("what", "value"), rows)


def _training(origin: Origin) -> str:
    at = "" if origin.step is None else f" The weights are of step {origin.step}, timeline {origin.timeline}"
    at += f" (checkpoint SHA-256 `{origin.sha256}`)." if origin.sha256 else ("." if at else "")
    if origin.identity is None:
        return f"## Data and recipe\n\nNot recorded: the checkpoint lies outside its run's folder.{at}"
    options = origin.identity["options"]
    dataset = origin.identity["dataset"]
    later = "; after `N:` stands what took over at epoch N" if " " in dataset else ""
    rows = [(f"`{path}`", _plain(options[path])) for path in sorted(options) if path.startswith(_SECTIONS)]
    return (
        f"## Data and recipe\n\nDataset fingerprint `{dataset}` (SHA-256 of its token ids "
        f"and masks{later}).{at}\n\n" + _table(("option", "value"), rows)
    )


def _acceptance(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "## Acceptance\n\nNot measured at export (`draftmill eval`)."
    how = "greedy" if found["sampling"] is None else f"sampled ({found['sampling']})"
    rows = [
        ("acceptance length, pooled over rounds", _number(found["acceptance_length"])),
        ("mean of per-request means", _number(found["acceptance_length_by_request"])),
        *(
            (f"pooled, {domain}", _number(length))
            for domain, length in found["acceptance_length_by_domain"].items()
            if domain
        ),
        (
            "answers are the target's own, up to ties of logits",
            {True: "yes", False: "NO", None: "-"}[found["lossless"]],
        ),
    ]
    return (
        f"## Acceptance\n\n{found['prompts']} held-out prompts, {how}, at most {found['max_new_tokens']} new "
        f"tokens, blocks of {found['block_size']}. Between 1 and {found['block_size']}.\n\n"
        + _table(("what", "value"), rows)
    )


def _checks(checked: Mapping[str, Any]) -> str:
    theirs = (
        f"z-lab's class loads every key; its hidden states differ by at most {checked['hidden_error']:.0e}."
        if checked["zlab"]
        else "z-lab's class was not at hand."
    )
    return f"## Checks at export\n\n{checked['tensors']} tensors read back as they were written. {theirs}"


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|---|", *(f"| {left} | {right} |" for left, right in rows)]
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
