"""``python -m verl_tool.servers.tests.test_calculator_tool calculator --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

from verl_tool.protocol import StepRequest
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

BATCH = 64


async def _formats(probe: Probe) -> None:
    for action in probe.tool.example_actions:
        await probe.expect(action, "10.1")


async def _arithmetic(probe: Probe) -> None:
    sums = {"13.1-3": "10.1", "2**10": "1024", "-7 // 2": "-4", "sqrt(16) + max(1, 2)": "6", "0.1+0.2": "0.3"}
    for expression, answer in sums.items():
        await probe.expect(f"<calculator>{expression}</calculator>", f"\n{answer}\n")


async def _errors(probe: Probe) -> None:
    wrong = {
        "1/0": "division by zero",
        "1 +": "ends too early",
        "__import__('os')": "cannot read it",
        "x": "is unknown",
    }
    for expression, words in wrong.items():
        await probe.expect(f"<calculator>{expression}</calculator>", words)


async def _no_hang(probe: Probe) -> None:
    for expression in ("9**9**9**9", "factorial(99999999)", "(" * 900, "1" * 100_000):
        await probe.expect(f"<calculator>{expression}</calculator>", "Error")


async def _several(probe: Probe) -> None:
    result = await probe.expect("<calculator>1+1</calculator> and <calculator>20+1</calculator>", "\n2\n", "\n21\n")
    if result.observation.index("\n2\n") > result.observation.index("\n21\n"):
        raise CheckFailed(f"the answers are out of order: {result.observation!r:.200}")


async def _batch(probe: Probe) -> None:
    requests = [StepRequest(probe.new_id(), f"<calculator>{i}*1000+7</calculator>") for i in range(BATCH)]
    for i, result in enumerate(await probe.answers(requests)):
        if f"\n{i * 1000 + 7}\n" not in result.observation:
            raise CheckFailed(f"entry {i} of the batch got {result.observation!r:.100}")


async def _unknown(probe: Probe) -> None:
    result = await probe.answer("I think that it is 7.")
    if result.valid or not result.observation:
        raise CheckFailed(f"text without a call was answered valid={result.valid}, {result.observation!r:.200}")


CASES = (
    LiveCase("every example action of GET /tools", _formats),
    LiveCase("arithmetic", _arithmetic),
    LiveCase("what cannot be calculated says why", _errors),
    LiveCase("no expression hangs", _no_hang),
    LiveCase("several calls in one action, in order", _several),
    LiveCase(f"a batch of {BATCH} trajectories", _batch),
    LiveCase("text without a call is not valid", _unknown),
)

app = command_line("calculator", "calculator", CASES, "Check the calculator of a live server, case by case.")

if __name__ == "__main__":
    app()
