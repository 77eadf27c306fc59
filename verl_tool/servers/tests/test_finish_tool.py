"""``python -m verl_tool.servers.tests.test_finish_tool finish --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        result = await probe.expect(action)
        if not result.done:
            raise CheckFailed(f"{action!r} did not end the trajectory")


async def _talk(probe: Probe) -> None:
    for text in ("I am finished.", "<finisher>1</finisher>", "<result><finish>1</finish></result>"):
        result = await probe.answer(text)
        if result.valid:
            raise CheckFailed(f"{text!r} was taken for a call")


async def _repeat(probe: Probe) -> None:
    trajectory = probe.new_id()
    first = await probe.answer("<finish>1</finish>", trajectory_id=trajectory, step=0)
    again = await probe.answer("<finish>1</finish>", trajectory_id=trajectory, step=0)
    if (first.done, first.observation) != (again.done, again.observation):
        raise CheckFailed(f"the same step was answered {first.observation!r}, then {again.observation!r}")


async def _from_outside(probe: Probe) -> None:
    trajectory = probe.new_id()
    for _ in range(2):
        [result] = await probe.client.finish([trajectory])
        if result.fault is not None:
            raise CheckFailed(f"finish=true gave the fault {result.fault.kind.value}: {result.fault.message}")


CASES = (
    LiveCase("every example action of GET /tools ends the trajectory", _formats),
    LiveCase("talk of finishing does not", _talk),
    LiveCase("a repeated step is answered alike", _repeat),
    LiveCase("finish=true from the trainer, twice", _from_outside),
)

app = command_line("finish", "finish", CASES, "Check the finish tool of a live server, case by case.")

if __name__ == "__main__":
    app()
