"""What an evaluation found, as JSON and as a table. No torch: reports are read where nothing is run.

Of several block sizes the JSON is that of the largest, with all of them under `block_sizes`, so that what
reads one result reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from services.dflash.acceptance import Acceptance

if TYPE_CHECKING:
    from services.dflash.sampling import Sampling
    from services.dflash.speculate import Generation


@dataclass(frozen=True)
class EvalResult:
    """One entry a prompt in `drafted` and, unless it was left out, in `plain`."""

    domains: tuple[str, ...]
    drafted: tuple[Generation, ...]
    plain: tuple[Generation, ...]
    ties: tuple[int, ...]  # prompts whose answers are the target's but for a tie of logits
    differing: tuple[int, ...]  # prompts whose answers are not the target's
    block_size: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    sampling: Sampling | None

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance(self.block_size, tuple(answer.accepted for answer in self.drafted))

    @property
    def lossless(self) -> bool | None:
        """None where it is not measured: sampled."""
        return not self.differing if self.sampling is None else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; NaN never occurs, None means not measured."""
        acceptance, drafted, plain = self.acceptance, _tokens_per_s(self.drafted), _tokens_per_s(self.plain)
        return {
            "prompts": len(self.drafted),
            "acceptance_length": _number(acceptance.pooled_mean),
            "acceptance_length_by_request": _number(acceptance.request_mean),
            "acceptance_length_by_domain": {
                domain: _number(acceptance.of(requests).pooled_mean)
                for domain, requests in self.by_domain().items()
            },
            "histogram": acceptance.histogram,
            "by_position": [_number(share) for share in acceptance.by_position],
            "by_position_by_domain": {
                domain: [_number(share) for share in acceptance.of(requests).by_position]
                for domain, requests in self.by_domain().items()
            },
            "lossless": self.lossless,
            "ties": list(self.ties),
            "differing": list(self.differing),
            "tokens": sum(len(answer.tokens) for answer in self.drafted),
            "drafted_tokens_per_s": drafted,
            "plain_tokens_per_s": plain,
            "speedup": drafted / plain if drafted and plain else None,
            "block_size": self.block_size,
            "max_new_tokens": self.max_new_tokens,
            "stop_ids": list(self.stop_ids),
            "sampling": None if self.sampling is None else dict(vars(self.sampling)),
            "per_request": [list(answer.accepted) for answer in self.drafted],
        }

    def table(self) -> Table:
        """The same for a reader at a terminal."""
        found, acceptance = self.to_dict(), self.acceptance
        table = Table(title=f"{found['prompts']} prompts, blocks of {self.block_size}", show_header=False)
        table.add_row("acceptance length (pooled)", f"{acceptance.pooled_mean:.3f}")
        table.add_row("acceptance length (mean of requests)", f"{acceptance.request_mean:.3f}")
        for domain, length in found["acceptance_length_by_domain"].items():
            if domain:
                table.add_row(f"  {domain}", "-" if length is None else f"{length:.3f}")
        table.add_row("rounds of 1, 2, .. tokens", " ".join(map(str, acceptance.histogram)))
        table.add_row("slot 1, 2, .. kept", " ".join(f"{share:.2f}" for share in acceptance.by_position))
        lossless = {True: "yes", False: f"NO: prompts {list(self.differing)}", None: "not measured"}[
            self.lossless
        ]
        table.add_row("lossless", lossless + (f" ({len(self.ties)} at a tie of logits)" if self.ties else ""))
        for name in ("drafted_tokens_per_s", "plain_tokens_per_s", "speedup"):
            table.add_row(name.replace("_", " "), "-" if found[name] is None else f"{found[name]:.2f}")
        return table

    def by_domain(self) -> dict[str, list[int]]:
        """Positions of the prompts of each domain, in order of appearance."""
        domains: dict[str, list[int]] = {}
        for request, domain in enumerate(self.domains):
            domains.setdefault(domain, []).append(request)
        return domains


def interleaved(parts: Sequence[EvalResult]) -> EvalResult:
    """The whole of which part i has the prompts i, i + n, i + 2 n, .. of n parts."""
    count = len(parts)

    def places(marked: str) -> tuple[int, ...]:
        return tuple(sorted(at * count + i for i, part in enumerate(parts) for at in getattr(part, marked)))

    def rows(name: str) -> tuple[Any, ...]:
        lists = [getattr(part, name) for part in parts]
        return tuple(
            lists[number % count][number // count] for number in range(sum(len(found) for found in lists))
        )

    return replace(
        parts[0],
        domains=rows("domains"),
        drafted=rows("drafted"),
        plain=rows("plain"),
        ties=places("ties"),
        differing=places("differing"),
    )


def to_json(results: Sequence[EvalResult]) -> dict[str, Any]:
    """What `draftmill eval --json` prints."""
    largest = max(results, key=lambda result: result.block_size)
    if len(results) == 1:
        return largest.to_dict()
    return {**largest.to_dict(), "block_sizes": [result.to_dict() for result in results]}


def comparison(results: Sequence[EvalResult]) -> Table:
    """Several block sizes side by side."""
    table = Table(title="by block size")
    for title in ("block", "acceptance", "by request", "drafted tok/s", "plain tok/s", "speedup", "lossless"):
        table.add_column(title, justify="right")
    for result in results:
        found = result.to_dict()
        rates = [found[name] for name in ("drafted_tokens_per_s", "plain_tokens_per_s", "speedup")]
        lengths = [found["acceptance_length"], found["acceptance_length_by_request"]]
        lossless = {True: "yes", False: "NO", None: "-"}[result.lossless]
        table.add_row(str(result.block_size), *map(_cell, (*lengths, *rates)), lossless)
    return table


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}" if value < 100 else f"{value:.0f}"


def _tokens_per_s(answers: Sequence[Generation]) -> float | None:
    """Decoding speed without the prompts' own forward."""
    seconds = sum(answer.decode_s for answer in answers)
    return sum(len(answer.tokens) - 1 for answer in answers) / seconds if seconds > 0 else None


def _number(value: float) -> float | None:
    return value if value == value else None
