"""Environments of OpenEnv's own classes. Run by an interpreter that has openenv, with a kind and a port."""

# mypy: ignore-errors
import os
import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

MAX_SESSIONS = 64


class GuessAction(Action):
    guess: str


class MoveAction(Action):
    """Moves on a line."""

    steps: int
    back: bool = False


class TextObservation(Observation):
    text: str


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self.secret = State(), None

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret, self._state = random.Random(seed).randint(1, 8), State(episode_id=episode_id)
        return TextObservation(text="Guess a number from 1 to 8.")

    def step(self, action, timeout_s=None, **kwargs):
        if action.guess == "crash":
            raise ValueError("boom")
        if action.guess == "exit":
            os._exit(1)
        if action.guess.startswith("long"):
            return TextObservation(text="x" * int(action.guess.removeprefix("long")))
        self._state.step_count += 1
        if not action.guess.isdigit():
            return TextObservation(text="no number", reward=-0.1)
        guess = int(action.guess)
        text = "right" if guess == self.secret else "lower" if guess > self.secret else "higher"
        return TextObservation(text=text, reward=float(guess == self.secret), done=guess == self.secret)

    @property
    def state(self):
        return self._state


class Walking(Guessing):
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.place = 0
        return TextObservation(text="Reach 3.")

    def step(self, action, timeout_s=None, **kwargs):
        self.place += -action.steps if action.back else action.steps
        return TextObservation(text=f"You are at {self.place}.", reward=float(self.place == 3), done=self.place == 3)


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Sum of two numbers."""
            return a + b

        @server.tool
        def crash() -> str:
            """Fails."""
            raise ValueError("boom")

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(reward=0.0, metadata={"task": "What is 3+4?"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()


if __name__ == "__main__":
    kind, port = sys.argv[1], int(sys.argv[2])
    made = {
        "guess": (Guessing, GuessAction, TextObservation),
        "walk": (Walking, MoveAction, TextObservation),
        "add": (Adding, CallToolAction, CallToolObservation),
    }[kind]
    app = create_fastapi_app(*made, max_concurrent_envs=MAX_SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", ws_ping_interval=1.0, ws_ping_timeout=1.0)
