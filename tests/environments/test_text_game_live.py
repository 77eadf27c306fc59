"""Text games of the packages themselves, each in its own virtual environment.

``VERL_TOOL_PEERS`` is the folder of `scripts/install_peers.sh` with the environments gem, textarena, skyrl_gym,
textworld and gymnasium.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from peer_programs import peer_python

from verl_tool.environments.text_game import TextGame
from verl_tool.protocol import ENVIRONMENT_FIELD, KEEP_FIELD, VERDICT_FIELD, FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
GUESS_NUMBER = Path(__file__).parents[2] / "examples" / "train" / "text_game" / "guess_number.py"


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[ToolSet]:
    tools = ToolSet([TextGame(**options)])
    await tools.start()
    yield tools
    await tools.close(grace_seconds=1.0)


async def play(tools: ToolSet, turns: Sequence[str], **arguments: Any) -> tuple[str, list[StepResult], float]:
    """Return the first message, the answers to the turns, and the verdict."""
    trajectory = f"{arguments}{turns}"
    [begun] = await tools.step([StepRequest(trajectory, "", 0, extra={ENVIRONMENT_FIELD: arguments})])
    assert begun.opening is not None, begun.fault
    results = []
    for step, turn in enumerate(turns, start=1):
        results += await tools.step([StepRequest(trajectory, turn, step, extra={KEEP_FIELD: True})])
        if results[-1].done:
            break
    [verdict] = await tools.step([StepRequest(trajectory, "", len(results) + 1, extra={VERDICT_FIELD: {}})])
    await tools.step([StepRequest(trajectory, "", finish=True)])
    assert verdict.reward is not None, verdict.fault
    return begun.opening.messages[-1]["content"], results, verdict.reward


async def test_gem_and_the_game_of_the_recipe_say_the_same() -> None:
    python, make = peer_python("gem"), {"max_number": 5, "max_turns": 3}
    games = [
        (python, "gem:game:GuessTheNumber-v0-easy"),
        (sys.executable, f"{GUESS_NUMBER}:GuessTheNumber"),
    ]
    turns = ([r"\boxed{3}", r"\boxed{2}", r"\boxed{4}"], [r"\boxed{1} or \boxed{9}", r"\boxed{1}", r"\boxed{1}"], ["5"])
    played = []
    for interpreter, name in games:
        async with served(python=interpreter, environment=name) as tools:
            found = [await play(tools, each, seed=seed, make=make) for seed in range(12) for each in turns]
            played.append([(first, [(r.observation, r.reward, r.done) for r in rs], v) for first, rs, v in found])
    assert played[0] == played[1]
    assert {verdict for _, _, verdict in played[0]} >= {1.0, -0.1}


async def test_gem_refuses_what_runs_programs_of_the_model() -> None:
    python = peer_python("gem")
    with pytest.raises(Exception, match="without a sandbox"):
        await TextGame(python=python, environment="gem:code:CodeContest").check_needs()
    with pytest.raises(Exception, match="GuessTheNumber-v0-easy"):
        await TextGame(python=python, environment="gem:game:GuessTheNumber-v0").check_needs()


async def test_textarena_sends_what_is_new_and_rewards_at_the_end() -> None:
    async with served(python=peer_python("textarena"), environment="textarena:GuessTheNumber-v0") as tools:
        first, results, verdict = await play(tools, ["[10]", "nothing", *[f"[{n}]" for n in (1, 2, 3)]], seed=4)
        assert "between 1 and 20" in first
        assert results[0].observation.startswith("[GAME] The target number is ")
        assert "invalid move" in results[1].observation
        assert all("between 1 and 20" not in result.observation for result in results)
        won, found = 0.0, 0
        for guess in range(1, 21):
            _, results, verdict = await play(tools, [f"[{guess}]"], seed=4)
            won, found = (verdict, guess) if results[-1].done else (won, found)
        assert won == 1.0
        assert results[-1].reward is None or found == 20


async def test_textarena_draws_the_same_for_a_seed_whatever_runs_concurrently() -> None:
    name = "textarena:FrozenLake-v0-random"
    async with served(python=peer_python("textarena"), environment=name, processes=12) as tools:
        alone = [(await play(tools, ["[right]"], seed=seed))[0] for seed in range(3)]
        together = await asyncio.gather(*[play(tools, [f"[down]{n}"], seed=n % 3) for n in range(12)])
    assert [first for first, _, _ in together] == alone * 4
    assert len(set(alone)) > 1


async def test_textarena_refuses_a_second_player_without_an_opponent(tmp_path: Path) -> None:
    python, name = peer_python("textarena"), "textarena:Nim-v0"
    async with served(python=python, environment=name) as tools:
        [begun] = await tools.step([StepRequest("t", "", 0, extra={ENVIRONMENT_FIELD: {"seed": 1}})])
        assert begun.fault is not None
        assert "players has to be 2" in begun.fault.message
    opponent = tmp_path / "nim.py"
    opponent.write_text("def take(text, rng):\n    return f'[{rng.randrange(3)} 1]'\n")
    async with served(python=python, environment=name, opponent=f"{opponent}:take") as tools:
        first, results, verdict = await play(tools, ["[0 1]", "[9 9]", "[9 9]"], seed=1)
        assert "Nim" in first
        assert "Player 1" in results[0].observation
        assert results[-1].done
        assert verdict == -1.0


async def test_an_opponent_that_raises_gives_its_turn_to_nobody(tmp_path: Path) -> None:
    opponent = tmp_path / "nim.py"
    opponent.write_text("def take(text, rng):\n    raise ValueError('no move')\n")
    python = peer_python("textarena")
    async with served(python=python, environment="textarena:Nim-v0", opponent=f"{opponent}:take") as tools:
        await tools.step([StepRequest("t", "", 0, extra={ENVIRONMENT_FIELD: {"seed": 1}})])
        for step in (1, 2):
            [result] = await tools.step([StepRequest("t", "[0 1]", step, extra={KEEP_FIELD: True})])
            assert result.fault is not None
            assert result.fault.kind is FaultKind.TOOL_CRASHED
            assert "the opponent raised ValueError: no move" in result.fault.message


async def test_skyrl_gym_plays_a_row() -> None:
    make = {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}],
        "extras": {"reward_spec": {"ground_truth": "4"}, "max_turns": 3},
    }
    async with served(python=peer_python("skyrl_gym"), environment="skyrl_gym:gsm8k_multi_turn") as tools:
        first, results, verdict = await play(tools, ["I think 5", "#### 5", "#### 4"], seed=0, make=make)
    assert first == "2+2?"
    assert [result.done for result in results] == [False, False, True]
    assert "####" in results[0].observation
    assert verdict == pytest.approx(1.0 + results[1].reward)


RISING = """
import gymnasium


class Rising(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Text(99)

    def __init__(self, top):
        self.top = top

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.last = int(self.np_random.integers(self.top))
        return f"Say more than {self.last}.", {}

    def step(self, action):
        rises = action.isdigit() and int(action) > self.last
        return "Right." if rises else "No.", float(rises), rises, False, {}


gymnasium.register("Rising-v0", Rising, max_episode_steps=2)
"""


async def test_gymnasium_plays_a_game_that_a_file_registers(tmp_path: Path) -> None:
    (tmp_path / "rising.py").write_text(RISING)
    name = f"gymnasium:{tmp_path}/rising.py:Rising-v0"
    async with served(python=peer_python("gymnasium"), environment=name) as tools:
        played = [await play(tools, ["x", "99"], seed=seed, make={"top": 50}) for seed in (1, 1, 2)]
        assert played[0][0] == played[1][0] != played[2][0]
        assert [(r.observation, r.reward, r.done) for r in played[0][1]] == [("No.", 0.0, False), ("Right.", 1.0, True)]
        _, results, verdict = await play(tools, ["x", "y", "99"], seed=3, make={"top": 50})
        assert (len(results), results[-1].done, verdict) == (2, True, 0.0)  # gymnasium's limit of steps


async def test_gymnasium_without_text_is_refused(tmp_path: Path) -> None:
    python = peer_python("gymnasium")
    async with served(python=python, environment="gymnasium:Blackjack-v1") as tools:
        [begun] = await tools.step([StepRequest("t", "", 0, extra={ENVIRONMENT_FIELD: {"seed": 1}})])
    assert begun.fault is not None
    assert "wrap the environment" in begun.fault.message
    with pytest.raises(Exception, match="has no environment 'Rising-v0'"):
        await TextGame(python=python, environment="gymnasium:Rising-v0").check_needs()


async def test_textworld_plays_a_compiled_game(tmp_path: Path) -> None:
    python = peer_python("textworld")
    options = ["--world-size", "2", "--nb-objects", "3", "--quest-length", "2", "--seed", "7"]
    command = [str(Path(python).with_name("tw-make")), "custom", *options, "--output", f"{tmp_path}/seven.z8"]
    variables = {**os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"}
    subprocess.run(command, check=True, capture_output=True, timeout=200, env=variables)  # noqa: ASYNC221
    turns = ["<do>dance</do>", "look", "<do>take teacup from chair</do>", "<do>put teacup on counter</do>"]
    async with served(python=python, environment=f"textworld:{tmp_path}", extract="do") as tools:
        first, results, verdict = await play(tools, turns, seed=0)
    assert "$$" not in first
    assert first.endswith(".")
    assert results[1].valid is False
    assert "between <do> and </do>" in results[1].observation
    assert results[-1].done
    assert verdict == 1.0
