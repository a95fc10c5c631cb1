"""Writes dashboards/draftmill.json: `python deploy/grafana/generate.py`, or `make docs`.

A panel is a line of `ROWS`; everything else (data source variable, legend, table of means, sizes) is the same
for all. A test holds the JSON to this file, and each expression to the metrics that the code serves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

OUT = Path(__file__).parent / "dashboards" / "draftmill.json"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
OURS = '{job="$job", instance=~"$instance"}'
ROLES = '{job="$job", instance=~"$instance", role=~"$role"}'


class Panel(NamedTuple):
    """`queries` are (expression, legend); `~` stands for a selector by job and instance, `@` by role too."""

    title: str
    unit: str  # Grafana's name of it
    description: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "lines"  # lines | stack | stat
    width: int = 12  # of 24
    limits: tuple[float | None, float | None] = (None, None)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Now": (
        Panel(
            "State", "none", "The state the run is in.",
            (("draftmill_run_state~ == 1", "{{state}}"),), kind="stat", width=4,
        ),
        Panel(
            "Progress", "percentunit", "Committed steps of all planned ones.",
            (("draftmill_step~ / draftmill_steps_planned~", "steps"),), kind="stat", width=4,
        ),
        Panel(
            "Throughput", "short", "Tokens of committed packs a second.",
            (("sum(rate(draftmill_committed_tokens_total~[$__rate_interval]))", "tok/s"),),
            kind="stat", width=4,
        ),
        Panel(
            "Since the last commit", "s", "Steps that do not end show here first.",
            (("draftmill_last_commit_age_seconds~", "age"),), kind="stat", width=4,
        ),
        Panel(
            "Failed samples", "short", "Listed in the ledger with their reasons.",
            (("draftmill_samples_failed~", "failed"),), kind="stat", width=4,
        ),
        Panel(
            "Restarts", "short", "Since this coordinator's start.",
            (("sum(draftmill_role_restarts_total~)", "restarts"),), kind="stat", width=4,
        ),
    ),
    "Throughput": (
        Panel(
            "Committed, against the run's best", "short",
            "Tokens a second that reached the weights, and the best five minutes of the time range shown.",
            (
                ("sum(rate(draftmill_committed_tokens_total~[$__rate_interval]))", "committed tok/s"),
                ("max(max_over_time(draftmill:committed_tokens:rate5m~[$__range]))", "best of the range"),
            ),
        ),
        Panel(
            "By role and device", "short", "Tokens a second that each role processed.",
            (("rate(draftmill_role_tokens_total@[$__rate_interval])", "{{role}} {{index}} {{device}}"),),
        ),
        Panel(
            "Payload written by targets", "Bps", "Hidden states into slots.",
            (("rate(draftmill_role_bytes_total@[$__rate_interval])", "{{role}} {{index}}"),),
        ),
        Panel(
            "Steps and packs", "ops", "Steps committed and packs processed a second.",
            (
                ("rate(draftmill_committed_steps_total~[$__rate_interval])", "steps"),
                ("sum by (role) (rate(draftmill_role_packs_total@[$__rate_interval]))", "packs, {{role}}s"),
            ),
        ),
    ),
    "Balance: who waits for whom": (
        Panel(
            "Waiting", "percentunit",
            "Share of its measured time that a role waits. The side that waits more is the wide one.",
            (("draftmill:role_waiting:ratio1m@", "{{role}} {{index}}"),), limits=(0, 1),
        ),
        Panel(
            "Pool", "short", "Batches in flight by state.",
            (('draftmill_batches{job="$job", instance=~"$instance", state=~"assigned|ready|leased"}',
              "{{state}}"),), kind="stack",
        ),
        Panel(
            "In flight against the cap", "short", "Packs between order and outcome; a cap of 0 is none.",
            (("draftmill_in_flight_packs~", "in flight"), ("draftmill_in_flight_cap_packs~", "cap"),
             ("draftmill_capped~", "held back by the cap")), width=8,
        ),
        Panel(
            "Slots and credits", "short", "Slots of all living targets, and batches they could be given now.",
            (("draftmill_slots~", "slots"), ("draftmill_slots_used~", "used"),
             ("draftmill_credits~", "credits")), width=8,
        ),
        Panel(
            "Arenas", "bytes", "Hidden states in memory, and what the file system has left.",
            (("draftmill_arena_bytes~", "arenas"), ("draftmill_in_flight_bytes~", "payload in flight"),
             ("draftmill_arena_free_bytes~", "free"), ("draftmill_arena_limit_bytes~", "file system"),
             ("draftmill_in_flight_cap_bytes~", "cap")), width=8,
        ),
    ),
    "Training": (
        Panel(
            "Loss", "short", "Of the last reported step, and of held-out samples (with an evaluator).",
            (("draftmill_loss~", "training"), ("draftmill_evaluated_loss~", "held out")),
        ),
        Panel(
            "Acceptance", "short", "In training: 1 + drafted tokens of a block before the first wrong one.",
            (("draftmill_accepted_tokens~", "tokens a block"),), width=6,
        ),
        Panel(
            "Accuracy", "percentunit", "Drafted tokens that equal the label.",
            (("draftmill_accuracy_ratio~", "training"), ("draftmill_evaluated_accuracy_ratio~", "held out")),
            width=6, limits=(0, 1),
        ),
        Panel(
            "Acceptance with the target", "short",
            "Tokens a round when the checkpoint decodes eval.prompts with the target (evaluator.count = 1).",
            (("draftmill_evaluated_acceptance_tokens~", "newest checkpoint"),
             ("draftmill_evaluated_best_acceptance_tokens~", "best, in run.dir/best")),
        ),
        Panel(
            "Evaluated step", "short", "How far evaluation is behind the training.",
            (("draftmill_evaluated_step~", "evaluated"), ("draftmill_step~", "trained")),
        ),
        Panel(
            "Learning rate", "sci", "Of that step.", (("draftmill_learning_rate~", "learning rate"),), width=8
        ),
        Panel(
            "Gradient norm", "short", "Before clipping.", (("draftmill_gradient_norm~", "norm"),), width=8
        ),
        Panel(
            "Failures", "short", "Failed batches by cause, and failed samples.",
            (("draftmill_batches_failed~", "batches, {{cause}}"), ("draftmill_samples_failed~", "samples")),
            width=8,
        ),
        Panel(
            "Samples", "short", "In the weights, of all planned; at the end only failed ones are missing.",
            (("draftmill_samples_committed~", "committed"), ("draftmill_samples_planned~", "planned")),
        ),
        Panel(
            "Epoch and history", "short", "The current epoch, and the timeline, which grows by a roll-back.",
            (("draftmill_epoch~", "epoch"), ("draftmill_timeline~", "timeline")),
        ),
    ),
    "Step anatomy": (
        Panel(
            "Targets", "percentunit",
            "Seconds a second by phase, mean over targets. Phases overlap, so the sum may pass 100 %.",
            (('avg by (phase) (rate(draftmill_role_phase_seconds_total{job="$job", instance=~"$instance", '
              'role="target"}[$__rate_interval]))', "{{phase}}"),), kind="stack",
        ),
        Panel(
            "Drafters", "percentunit", "Seconds a second by phase, mean over drafters.",
            (('avg by (phase) (rate(draftmill_role_phase_seconds_total{job="$job", instance=~"$instance", '
              'role="drafter"}[$__rate_interval]))', "{{phase}}"),), kind="stack",
        ),
    ),
    "Health": (
        Panel(
            "Roles up", "short", "Living roles that have reported, and the places of the run.",
            (("sum by (role) (draftmill_role_up@)", "{{role}}s up"),
             ("draftmill_roles_wanted@", "{{role}}s wanted")), width=8,
        ),
        Panel(
            "Silence", "s", "Since a role's last message; fenced after coordinator.silence_s.",
            (("draftmill_role_silent_seconds@", "{{role}} {{index}}"),), width=8,
        ),
        Panel(
            "Recovery", "s", "From the last death in a place to its next report.",
            (("draftmill_role_recovery_seconds@", "{{role}}"),), width=8,
        ),
        Panel(
            "Restarts and deaths", "short", "In the last hour.",
            (("sum by (role) (increase(draftmill_role_restarts_total@[1h]))", "restarts, {{role}}s"),
             ("sum by (role) (increase(draftmill_role_deaths_total@[1h]))", "deaths, {{role}}s")), width=8,
        ),
        Panel(
            "Work undone", "short", "In the last hour.",
            (("increase(draftmill_aborted_tries_total~[1h])", "aborted tries"),
             ("increase(draftmill_roll_backs_total~[1h])", "roll-backs"),
             ("increase(draftmill_lost_steps_total~[1h])", "steps rolled back"),
             ("increase(draftmill_evictions_total~[1h])", "evictions")), width=8,
        ),
        Panel(
            "Messages refused or stale", "short", "In the last hour. Stale ones are normal after a death.",
            (("increase(draftmill_refused_messages_total~[1h])", "refused"),
             ("increase(draftmill_stale_messages_total~[1h])", "stale")), width=8,
        ),
    ),
    "Checkpoints": (
        Panel(
            "Uploads", "short", "Recorded checkpoints not yet at checkpoint.upload, and failed copies.",
            (("draftmill_upload_pending~", "pending"), ("draftmill_upload_errors_total~", "failed copies")),
        ),
    ),
    "GPU": (
        Panel(
            "Utilization", "percentunit", "Share of the time in which a kernel ran (needs nvidia-ml-py).",
            (("draftmill_gpu_utilization_ratio@", "{{role}} {{index}} {{device}}"),), limits=(0, 1),
        ),
        Panel(
            "Memory", "bytes", "In use by all processes, and the GPU's own.",
            (("draftmill_gpu_memory_used_bytes@", "{{role}} {{index}} {{device}}"),
             ("max(draftmill_gpu_memory_limit_bytes@)", "limit")),
        ),
        Panel(
            "Power", "watt", "Power draw.",
            (("draftmill_gpu_power_watts@", "{{role}} {{index}} {{device}}"),),
        ),
        Panel(
            "Temperature", "celsius", "Of the GPU.",
            (("draftmill_gpu_temperature_celsius@", "{{role}} {{index}} {{device}}"),),
        ),
    ),
}  # fmt: skip


def expression(template: str) -> str:
    """With the dashboard's selectors in place of `~` and `@` (but not of the regex operator `=~`)."""
    return template.replace("=~", "\0").replace("~", OURS).replace("@", ROLES).replace("\0", "=~")


def query(number: int, template: str, legend: str, *, at_once: bool) -> prometheus.Dataquery:
    made = prometheus.Dataquery().expr(expression(template)).legend_format(legend).ref_id(chr(65 + number))
    return made.datasource(SOURCE).instant() if at_once else made.datasource(SOURCE).range()


def panel(spec: Panel) -> Any:
    """A builder of the panel."""
    if spec.kind == "stat":
        made: Any = stat.Panel().height(4)
        if "{{" in spec.queries[0][1]:
            made = made.text_mode(common_models.BigValueTextMode.NAME)
    else:
        made = timeseries.Panel().height(8).line_width(1.5).show_points(common_models.VisibilityMode.NEVER)
        legend = common.VizLegendOptions().show_legend(True).calcs(["mean", "lastNotNull"])
        legend = legend.display_mode(common_models.LegendDisplayMode.TABLE)
        made = made.legend(legend.placement(common_models.LegendPlacement.BOTTOM))
        made = made.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        if spec.kind == "stack":
            made = made.fill_opacity(40).stacking(
                common.StackingConfig().mode(common_models.StackingMode.NORMAL)
            )
    made = made.title(spec.title).description(spec.description).unit(spec.unit).span(spec.width)
    low, high = spec.limits
    made = made if low is None else made.min(low)
    made = made if high is None else made.max(high)
    for number, (template, legend_format) in enumerate(spec.queries):
        made = made.with_target(query(number, template, legend_format, at_once=spec.kind == "stat"))
    return made.datasource(SOURCE)


def variable(name: str, label: str, label_values: str, *, several: bool) -> dashboard.QueryVariable:
    made = dashboard.QueryVariable(name).label(label).query(label_values).datasource(SOURCE)
    made = made.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    return made.multi(True).include_all(True).all_value(".*") if several else made


def build() -> str:
    """The dashboard's JSON."""
    runs, places = 'draftmill_run_info{job="$job"}', 'draftmill_roles_wanted{job="$job"}'
    made = (
        dashboard.Dashboard("draftmill")
        .uid("draftmill")
        .description("Throughput, balance, training and health of a draftmill run")
        .tags(["draftmill"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(variable("job", "Job", "label_values(draftmill_run_info, job)", several=False))
        .with_variable(variable("instance", "Coordinator", f"label_values({runs}, instance)", several=True))
        .with_variable(variable("role", "Role", f"label_values({places}, role)", several=True))
    )
    for title, panels in ROWS.items():
        made = made.with_row(dashboard.Row(title))
        for spec in panels:
            made = made.with_panel(panel(spec))
    tree = json.loads(JSONEncoder(sort_keys=True).encode(made.build()))
    for number, entry in enumerate(tree["panels"], start=1):
        entry["id"] = number
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    OUT.write_text(build(), encoding="utf-8")
