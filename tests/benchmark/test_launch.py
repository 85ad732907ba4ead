import pytest

from lightning_perf.benchmark.launch import TurnPlan, plan_turns


@pytest.mark.parametrize(
    ("step_a", "step_b", "plan"),
    [
        (0.001, 0.001, TurnPlan(33, 3, 5, pairs=7)),
        (0.0014, 0.001, TurnPlan(33, 3, 5, pairs=6)),
        (0.005, 0.005, TurnPlan(9, 3, 1, pairs=5)),
        (0.02, 0.05, TurnPlan(4, 1, 1, pairs=2)),
        (0.2, 0.2, TurnPlan(4, 1, 1)),
        (0.65, 1.4, TurnPlan(4, 1, 1)),
        (30.0, 20.0, TurnPlan(4, 1, 1)),
    ],
)
def test_turns_are_long_enough_and_not_too_long(step_a, step_b, plan):
    assert plan_turns(step_a, step_b, accumulate=1, prefetched=0) == plan
    assert plan_turns(step_b, step_a, accumulate=1, prefetched=0) == plan


@pytest.mark.parametrize("step", [0.001, 0.05, 0.2, 2.0])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 4, 8, 16])
def test_windows_hold_whole_optimizer_steps(step, accumulate):
    plan = plan_turns(step, step, accumulate=accumulate, prefetched=0)
    assert plan.window % accumulate == 0
    assert plan.steps - plan.discard >= plan.window
    assert (plan.steps - plan.discard) % plan.window == 0


@pytest.mark.parametrize("step", [0.001, 0.2])
def test_batches_that_lie_ready_do_not_count(step):
    plan = plan_turns(step, step, accumulate=1, prefetched=8)
    assert plan.discard == 9
    assert plan.steps > plan.discard + plan.window
