"""Each rule between options, and what the default configuration allows."""

import pytest
import torch

from protocol.codec import MAX_MESSAGE_BYTES, decode, encode
from protocol.messages import Assignment, BatchId, Publication, Stamp, TargetOrders
from protocol.sockets import MAX_IPC_PATH_BYTES
from services.config.rules import broken_rules, packs_needed, rows_limit
from services.config.schema import Config


def make(**sections) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}} | sections)


def test_the_defaults_break_no_rule():
    assert broken_rules(make()) == []


def test_packs_needed_counts_step_prefetch_and_forwards():
    config = make(plan={"packs_per_step": 4}, drafter={"prefetch_packs": 2, "count": 3})
    assert packs_needed(config, targets=5) == 4 + 2 * 3 + 5


def test_arrival_order_waits_for_min_ready():
    config = make(plan={"packs_per_step": 4, "order": "arrival", "min_ready": 10})
    assert packs_needed(config, targets=1) == 10 + 2 + 1
    (broken,) = broken_rules(config)
    assert "8 slots must hold 13 packs (a step, or plan.min_ready, the prefetch" in broken.rule


@pytest.mark.parametrize(
    ("sections", "option"),
    [
        ({"data": {"path": "d", "later": ("2:e", "1:f")}, "run": {"epochs": 3}}, "data.later"),
        ({"data": {"path": "d", "later": ("1:e", "1:f")}, "run": {"epochs": 3}}, "data.later"),
        ({"data": {"path": "d", "later": ("1:e", "3:f")}, "run": {"epochs": 3}}, "data.later"),
        ({"plan": {"bucket_edges": ()}}, "plan.bucket_edges"),
        ({"plan": {"bucket_edges": (64, 64)}}, "plan.bucket_edges"),
        ({"plan": {"bucket_edges": (64, 8192)}}, "plan.token_budget"),
        ({"target": {"gpus": ("0",), "count": 2}}, "target.gpus"),
        ({"drafter": {"gpus": ("0",), "count": 2}}, "drafter.gpus"),
        ({"target": {"gpus": ("GPU-5d7f",)}}, "target.gpus"),
        ({"drafter": {"gpus": ("0", "cuda")}}, "drafter.gpus"),
        ({"evaluator": {"gpu": "gpu0"}}, "evaluator.gpu"),
        ({"drafter": {"target_layer_ids": (3, 1)}}, "drafter.target_layer_ids"),
        ({"drafter": {"sliding_layers": 6}}, "drafter.sliding_layers"),
        ({"recipe": {"beta2": 1.0}}, "recipe.beta2"),
        ({"coordinator": {"silence_s": 2.0}}, "coordinator.silence_s"),
        ({"coordinator": {"endpoint": "http://x"}}, "coordinator.endpoint"),
        ({"coordinator": {"endpoint": "tcp://0.0.0.0:1"}}, "coordinator.endpoint"),
        ({"target": {"slots": 6}}, "target.slots"),
        ({"plan": {"token_budget": 2**20, "bucket_edges": (16,)}, "target": {"slots": 101}}, "target.slots"),
        ({"coordinator": {"in_flight_cap_packs": 6}}, "coordinator.in_flight_cap_packs"),
        ({"evaluator": {"count": 1}}, "eval.prompts"),
    ],
)
def test_each_rule_names_its_options(sections, option):
    broken = broken_rules(make(**sections))
    assert [found for found in broken if option in found.options], broken


def test_a_device_is_cpu_or_a_number_as_torch_reads_it():
    names = ("cpu", "0", "17", "cuda:0", "cuda:12")
    for name in names:
        assert torch.device(f"cuda:{name}" if name.isdigit() else name)
    for name in ("01", "cuda:01", "²", "GPU-5d7f"):
        with pytest.raises(RuntimeError):
            torch.device(f"cuda:{name}" if name.isdigit() else name)
        assert broken_rules(make(target={"gpus": (name,)}))
    assert not broken_rules(make(target={"gpus": names}, drafter={"gpus": names}))


@pytest.mark.parametrize("allowed", [{"keys": "folder"}, {"insecure": True}])
def test_tcp_is_for_those_with_keys_or_on_a_closed_network(allowed):
    tcp = {"endpoint": "tcp://0.0.0.0:1"}
    (broken,) = broken_rules(make(coordinator=tcp))
    assert broken.options == ("coordinator.endpoint", "coordinator.keys")
    assert broken_rules(make(coordinator=tcp | allowed)) == []


@pytest.mark.parametrize(("budget", "edge"), [(65_536, 16), (4096, 64), (1, 1)])
def test_orders_for_all_slots_fit_a_message(budget, edge):
    """At their largest: every slot has a full batch, published to a long inbox under the largest stamps."""

    def sections(slots: int) -> dict:
        return {"plan": {"token_budget": budget, "bucket_edges": (edge,)}, "target": {"slots": slots}}

    (broken,) = broken_rules(make(**sections(10**9)))
    most = int(broken.rule.partition("lower target.slots to ")[2].partition(",")[0])
    assert broken_rules(make(**sections(most + 1))) and not broken_rules(make(**sections(most)))
    stamp = Stamp(2**62, 2**62)
    publication = Publication(lease=stamp, inbox="ipc://" + "x" * MAX_IPC_PATH_BYTES)
    assignment = Assignment(
        batch=BatchId(2**62, 2**62), attempt=stamp, publish=publication,
        samples=tuple(range(2**32 - rows_limit(edge, budget), 2**32)),
    )  # fmt: skip
    orders = TargetOrders(incarnation="x" * 128, stamp=stamp, assignments=(assignment,) * most)
    frames = encode(orders)
    assert decode(frames) == orders
    assert len(frames[1]) > 0.3 * MAX_MESSAGE_BYTES, "the rule asks for much less than fits"


def test_a_cap_that_just_fits_is_allowed():
    assert broken_rules(make(coordinator={"in_flight_cap_packs": 7}, target={"slots": 7})) == []
