"""What packages of text environments call their games, as one interface: `HostedGame`.

An environment is named by its kind, such as ``gem:game:GuessTheNumber-v0``, or as ``module:factory`` or
``path/file.py:factory``, where the factory returns an object with ``reset(seed=...) -> observation, info`` and
``step(action) -> observation, reward, terminated, truncated, info``, as gymnasium has it, and text observations.
Runs in the foreign interpreter with the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any


RUNS_PROGRAMS = "{} runs programs that the model writes, here without a sandbox; it is not served"


class KindError(Exception):
    """An environment cannot be served; the message says why, and what to do."""


class GameFailedError(Exception):
    """The game cannot go on."""


class HostedGame:
    """One episode of an environment."""

    truncated = False
    """Whether a limit of the environment's ended it."""

    def begin(self, seed: int) -> list[dict[str, str]]:
        """Start the episode and return its first chat messages."""
        raise NotImplementedError

    def step(self, action: str) -> tuple[str, float | None, bool]:
        """Play an action and return what is new to see, the reward if there is one, and whether the episode ended."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the environment holds."""


if TYPE_CHECKING:
    Maker = Callable[[Mapping[str, Any]], HostedGame]
    """Make a game from a row's ``make``."""


def load_kind(environment: str, opponent: str | None = None) -> Maker:
    """Import the package of an environment and return what makes its games. Raises KindError, and whatever the package
    raises while it is imported."""
    kind, colon, name = environment.partition(":")
    if not colon or not kind or not name:
        raise KindError(
            "environment is {!r}; write KIND:NAME with one of the kinds {}, or module:factory".format(
                environment, ", ".join(KINDS)
            )
        )
    if opponent is not None and kind != "textarena":
        raise KindError(f"opponent={opponent!r}: only games of textarena have one")
    if kind == "textarena":
        return _load_textarena(name, opponent)
    if kind in KINDS:
        return KINDS[kind](name)
    factory = _load_factory(environment)
    return lambda make: GymnasiumLike(factory(**make))


class GymnasiumLike(HostedGame):
    """An environment with gymnasium's `reset` and `step` and text observations."""

    def __init__(self, env: Any) -> None:
        self._env = env

    def begin(self, seed: int) -> list[dict[str, str]]:
        observation, info = self._env.reset(seed=seed)
        return [{"role": "user", "content": self._text(observation, info)}]

    def step(self, action: str) -> tuple[str, float | None, bool]:
        observation, reward, terminated, truncated, info = self._env.step(action)
        self.truncated = bool(truncated) and not terminated
        done = bool(terminated) or self.truncated
        return self._text(observation, {} if done else info), float(reward), done

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _text(self, observation: Any, info: Any) -> str:
        if not isinstance(observation, str):
            kind = type(observation).__name__
            raise TypeError(f"the observation is of type {kind}, not text; wrap the environment")
        return observation


class GemGame(GymnasiumLike):
    """A game of gem. It asks for the next action in ``info["suffix"]``, as gem's own wrapper shows it."""

    def _text(self, observation: Any, info: Any) -> str:
        text, suffix = super()._text(observation, info), str(info.get("suffix", ""))
        return "{}{}{}".format(text, "\n" if text and suffix and not text.endswith("\n") else "", suffix)


def _load_gem(name: str) -> Maker:
    gem = importlib.import_module("gem")
    registry = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    _check_known(name, registry, "gem")
    if name.startswith("code:") or "CodeContest" in name:
        raise KindError(RUNS_PROGRAMS.format("gem:" + name))
    return lambda make: GemGame(gem.make(name, **make))


class TextArenaGame(HostedGame):
    """A game of TextArena for one player, or for two with a scripted opponent. Its reward comes at the end.

    TextArena's wrapper repeats the whole game each turn; this one shows the messages since the last turn, without the
    player's own actions.
    """

    PLAYER = 0

    def __init__(self, env: Any, opponent: Callable[[str, random.Random], str] | None) -> None:
        self._env, self._opponent = env, opponent
        self._failed: str | None = None
        self._inner = env
        while hasattr(self._inner, "env"):
            self._inner = self._inner.env

    def begin(self, seed: int) -> list[dict[str, str]]:
        self._random = random.Random(seed)
        self._env.reset(num_players=1 if self._opponent is None else 2, seed=seed)
        self._seen: list[str] = []
        if self._play_opponent():
            raise KindError("the game ended before the first turn")
        return [{"role": "user", "content": self._take_messages()}]

    def step(self, action: str) -> tuple[str, float | None, bool]:
        if self._failed is not None:
            raise GameFailedError(self._failed)
        done, _ = self._env.step(action=action)
        if not done and not self._play_opponent():
            return self._take_messages(), None, False
        rewards, info = self._env.close()
        player = (info or {}).get(self.PLAYER, {})
        return str(player.get("reason") or ""), float((rewards or {}).get(self.PLAYER, 0.0)), True

    def _play_opponent(self) -> bool:
        """Play the opponent's turns and return whether the game ended. Keeps what our player can see."""
        while True:
            player, messages = self._inner.get_observation()
            text = "\n".join(
                self._render(sender, text) for sender, text, kind in messages if not _is_own(sender, kind, player)
            )
            if player == self.PLAYER:
                self._seen.append(text)
                return False
            if self._opponent is None:
                raise KindError(f"it is the turn of player {player}, and there is no opponent")
            try:
                move = str(self._opponent(text, self._random))
            except Exception as error:
                # It is the opponent's turn still, and the next action would be played for it.
                self._failed = f"the opponent raised {type(error).__name__}: {error}"
                raise GameFailedError(self._failed) from error
            if self._env.step(action=move)[0]:
                return True

    def _take_messages(self) -> str:
        seen, self._seen = self._seen, []
        return "\n".join(seen)

    def _render(self, sender: int, text: str) -> str:
        return "[{}] {}".format(self._inner.state.role_mapping.get(sender, f"Player {sender}"), text)


def _is_own(sender: int, kind: Any, player: int) -> bool:
    return bool(sender == player and kind.name == "PLAYER_ACTION")


def _load_textarena(name: str, opponent: str | None = None) -> Maker:
    textarena = importlib.import_module("textarena")
    registry = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    _check_known(name, registry, "textarena")
    play = None if opponent is None else _load_factory(opponent)

    def make_game(make: Mapping[str, Any]) -> HostedGame:
        return TextArenaGame(textarena.make(env_id=name, **make), play)

    return make_game


class SkyRLGymGame(HostedGame):
    """An environment of SkyRL-Gym, which is made from a row: ``prompt``, ``extras`` and ``env_config``."""

    def __init__(self, env: Any, prompt: list[dict[str, str]]) -> None:
        self._env, self._prompt = env, prompt

    def begin(self, seed: int) -> list[dict[str, str]]:
        messages, _ = self._env.init(list(self._prompt))
        return [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]

    def step(self, action: str) -> tuple[str, float | None, bool]:
        out = self._env.step(action)
        text = "\n".join(str(message["content"]) for message in out["observations"])
        return text, float(out["reward"]), bool(out["done"])

    def close(self) -> None:
        self._env.close()


def _load_skyrl_gym(name: str) -> Maker:
    skyrl_gym = importlib.import_module("skyrl_gym")
    if name in ("lcb", "searchcode"):
        raise KindError(RUNS_PROGRAMS.format("skyrl_gym:" + name))
    registry = importlib.import_module("skyrl_gym.envs.registration").registry
    _check_known(name, registry, "skyrl_gym")
    dict_config = importlib.import_module("omegaconf").DictConfig

    def make_game(make: Mapping[str, Any]) -> HostedGame:
        unknown = sorted(set(make) - {"prompt", "extras", "env_config"})
        if unknown:
            raise KindError(f"make has {unknown}; an environment of skyrl_gym takes prompt, extras and env_config")
        config, extras = dict_config(dict(make.get("env_config", {}))), dict(make.get("extras", {}))
        return SkyRLGymGame(skyrl_gym.make(name, env_config=config, extras=extras), list(make.get("prompt", ())))

    return make_game


class TextWorldGame(HostedGame):
    """A compiled game of TextWorld. Of a folder of games the seed picks one. The reward is the increase of the
    score."""

    def __init__(self, textworld: Any, files: list[str]) -> None:
        self._textworld, self._files, self._score = textworld, files, 0
        self._env: Any = None

    def begin(self, seed: int) -> list[dict[str, str]]:
        request = self._textworld.EnvInfos(score=True, won=True, lost=True)
        self._env = self._textworld.start(self._files[seed % len(self._files)], request)
        self._env.seed(seed)
        return [{"role": "user", "content": _without_prompt(self._env.reset().feedback)}]

    def step(self, action: str) -> tuple[str, float | None, bool]:
        state, score, done = self._env.step(" ".join(action.split()))
        reward, self._score = score - self._score, score
        return _without_prompt(state.feedback), float(reward), bool(done)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()


def _without_prompt(feedback: str) -> str:
    """Drop the banner before the text, and the interpreter's prompt and status line, which follow it."""
    text = feedback.rpartition("\n>")[0] if "\n>" in feedback else feedback
    lines = text.split("\n")
    banner = [number for number, line in enumerate(lines) if "$$" in line]
    return "\n".join(lines[banner[-1] + 1 if banner else 0 :]).strip()


_TEXTWORLD_GAMES = (".z8", ".ulx")


def _load_textworld(path: str) -> Maker:
    textworld = importlib.import_module("textworld")
    files = [path]
    if os.path.isdir(path):
        files = sorted(os.path.join(path, file) for file in os.listdir(path) if file.endswith(_TEXTWORLD_GAMES))
    if not files or not all(file.endswith(_TEXTWORLD_GAMES) and os.path.isfile(file) for file in files):
        raise KindError(
            "textworld:{} is neither a game ({}) nor a folder of games; make one with tw-make".format(
                path, ", ".join(_TEXTWORLD_GAMES)
            )
        )

    def make_game(make: Mapping[str, Any]) -> HostedGame:
        if make:
            raise KindError(f"make has {sorted(make)}; a game of textworld is compiled and takes nothing")
        return TextWorldGame(textworld, files)

    return make_game


def _load_gymnasium(name: str) -> Maker:
    """``NAME``, or ``module:NAME`` or ``path/file.py:NAME`` of what registers it."""
    gymnasium = importlib.import_module("gymnasium")
    source, _, name = name.rpartition(":")
    if source:
        _import(source)
    _check_known(name, gymnasium.registry, "gymnasium")
    return lambda make: GymnasiumLike(gymnasium.make(name, **make))


KINDS: dict[str, Callable[[str], Maker]] = {
    "gem": _load_gem,
    "textarena": _load_textarena,
    "skyrl_gym": _load_skyrl_gym,
    "textworld": _load_textworld,
    "gymnasium": _load_gymnasium,
}


def _check_known(name: str, registry: Any, kind: str) -> None:
    if name not in registry:
        near = [known for known in registry if name.partition("-")[0].lower() in known.lower()][:8]
        raise KindError(
            "{} has no environment {!r}; it has {}{}".format(
                kind, name, len(registry), ", such as {}".format(", ".join(near or sorted(registry)[:8]))
            )
        )


def _load_factory(name: str) -> Callable[..., Any]:
    """Import ``module:attribute`` or ``file.py:attribute``."""
    source, _, attribute = name.rpartition(":")
    factory = getattr(_import(source), attribute, None)
    if not callable(factory):
        raise KindError(f"{name!r}: {source} has no function or class {attribute}")
    return factory


def _import(source: str) -> Any:
    """Import a module, or a file whose name ends with ``.py``."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    name = f"verl_tool_game_{os.path.basename(source)[:-3]}"
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None or not os.path.isfile(source):
        raise KindError(f"there is no file {source}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
