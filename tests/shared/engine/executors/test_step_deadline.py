from __future__ import annotations

from shared.engine.executors.loading.warm_up import idle_step
from shared.engine.executors.step_deadline import COMPILE_S, StepBudget, step_units
from shared.engine.executors.timing_executor import TimingExecutor
from shared.engine.loop import EngineLoop
from tests.support.engine.rig import InstantClock, Rig

STEP = step_units(idle_step(16, [1]))


def test_compiled_kernel_extends_the_budget_of_its_step_alone() -> None:
    budget = StepBudget()
    usual_s = budget.seconds(STEP)
    assert budget.extension_s == 0
    budget.compiling()
    budget.compiling()
    assert budget.extension_s == 2 * COMPILE_S
    budget.observe(STEP, 20.0)
    assert budget.seconds(STEP) == usual_s, "the compiler's time is not the model's pace"
    assert budget.extension_s == 0
    budget.observe(STEP, 20.0)
    assert budget.seconds(STEP) > 10 * usual_s


class CompilingExecutor(TimingExecutor):
    step_extension_s = COMPILE_S  # type: ignore[assignment]


def test_heartbeats_announce_the_extended_budget() -> None:
    rig = Rig()
    plain = EngineLoop(rig.engine, rig.executor, InstantClock()).load().step_budget_s
    compiling = CompilingExecutor(InstantClock(), num_blocks=1)
    load = EngineLoop(rig.engine, compiling, InstantClock()).load()
    assert load.step_budget_s == plain + COMPILE_S
