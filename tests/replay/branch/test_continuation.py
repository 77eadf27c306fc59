"""The loop goes on behind recorded tokens and rebuilt states; what is edited is encoded and marked."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("transformers")

from branch_runs import Told, answer, authors, branch_run, recorded, runs_of, shop_tool
from live_server import LiveServers
from stored_runs import TOKENIZER
from toy_model import END, ScriptedEngine, Template, ToyTokenizer, ToyTools

from eval_service.evaluation.dataset import Problem
from eval_service.settings import Sampling
from verl_tool.agent_loop.actions import LoopFormats
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.prompt.prompt_renderer import PromptRenderer
from verl_tool.agent_loop.tokenizer import render_prompt
from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError
from verl_tool.replay.branch.branch_point import BranchPoint, Edit, RecordLocation, make_branch_point
from verl_tool.replay.branch.continuation import Continuation
from verl_tool.replay.branch.model import Model
from verl_tool.replay.branch.rebuilt_state import StateRebuilder
from verl_tool.replay.branch.run_loop import RunLoop, load_run_loop
from verl_tool.replay.reexecute import ObservationComparison
from verl_tool.replay.stored import StoredRun
from verl_tool.servers.tools import load_tools

pytestmark = pytest.mark.slow

TURNS = ["<shop>tea</shop>", "<shop>rice</shop>", "Result=3"]
LOCATION = RecordLocation("step_1.jsonl", 1)


async def shop(servers: LiveServers, folder: Path) -> str:
    return (await servers.start(load_tools(str(shop_tool(folder, forks=True))))).url


async def point_of(
    url: str, folder: Path, turn: int, edit: Edit | None, turns: list[str] = TURNS
) -> tuple[BranchPoint, RunLoop]:
    run = branch_run(folder, [await recorded(url, turns)])
    return make_branch_point(LOCATION, StoredRun(run).find(LOCATION.file, LOCATION.line), turn, edit), load_run_loop(
        run, None, validation=False
    )


async def gone_on(url: str, point: BranchPoint, loop: RunLoop, model: Told) -> Trajectory:
    async with ToolClient(url) as client:
        rebuilder = StateRebuilder(client, ObservationComparison([]), loop.options)
        async with rebuilder.rebuild(point, 1) as states:
            return await Continuation(loop, Model(model), client).run(point, states.trajectory_ids[0])


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


async def test_all_before_the_turn_is_as_it_was_and_the_model_goes_on(servers: LiveServers, tmp_path: Path) -> None:
    url = await shop(servers, tmp_path)
    point, loop = await point_of(url, tmp_path, 2, None)
    model = Told("<shop>salt</shop>", "Result=4")
    made = await gone_on(url, point, loop, model)
    assert made.segments[:3] == point.trajectory.segments[:3]
    assert made.response_text == "".join(
        ["<shop>tea</shop>", answer("[tea at 3]"), "<shop>salt</shop>", answer("[tea salt at 3]"), "Result=4"]
    )
    assert (made.stop, [call.step for call in made.calls]) == (StopReason.ANSWERED, [0, 1])
    assert model.fed[made.trajectory_id][0] == [t for s in point.partial.segments for t in s.tokens]
    log_probs = made.response_log_probs
    assert log_probs is not None
    timings = made.timings
    assert timings.turns[0] == point.trajectory.timings.turns[0]
    assert (len(timings.turns), timings.generate) == (3, pytest.approx(sum(timings.turns)))
    assert timings.total >= timings.generate + timings.tools


async def test_an_edited_action_is_run_and_is_none_of_the_models_tokens(servers: LiveServers, tmp_path: Path) -> None:
    url = await shop(servers, tmp_path)
    point, loop = await point_of(url, tmp_path, 2, Edit("action", "I want <shop>salt</shop>"))
    made = await gone_on(url, point, loop, Told("Result=4"))
    assert (authors(made), made.num_turns) == ("mtMtm", 3)
    assert made.segments[3].tokens == tuple(ids("I want <shop>salt</shop>"))
    assert made.calls[1].observation == answer("[tea salt at 3]")
    tea, first, edit, second, result = (len(s.tokens) for s in made.response)
    assert runs_of(made.response_mask) == [(1, tea), (0, first + edit + second), (1, result)]
    assert made.loss_mask == made.response_mask
    assert made.response_log_probs == [-0.25] * tea + [0.0] * (first + edit + second) + [-0.25] * result
    assert runs_of(made.turn_ids) == [(1, tea), (0, first + edit + second), (3, result)]
    assert made.model_text == "<shop>tea</shop>I want <shop>salt</shop>Result=4"
    assert Trajectory.from_json(made.to_json()) == made


async def test_an_edited_answer_ends_the_trajectory(servers: LiveServers, tmp_path: Path) -> None:
    url = await shop(servers, tmp_path)
    point, loop = await point_of(url, tmp_path, 2, Edit("action", "Result=4"))
    made = await gone_on(url, point, loop, Told())
    assert (authors(made), made.stop) == ("mtM", StopReason.ANSWERED)


async def test_an_edited_observation_is_shown_in_place_of_the_tools(servers: LiveServers, tmp_path: Path) -> None:
    url = await shop(servers, tmp_path)
    point, loop = await point_of(url, tmp_path, 2, Edit("observation", "[sold out]"))
    made = await gone_on(url, point, loop, Told("<shop>salt</shop>", "Result=4"))
    assert authors(made) == "mtmTmtm"
    assert made.segments[:4] == point.trajectory.segments[:4]
    assert made.segments[4].tokens == tuple(ids("[sold out]"))
    # The call was run all the same: the tool knows of it.
    assert made.calls[1].observation == "[sold out]"
    assert made.calls[2].observation == answer("[tea rice salt at 3]")
    assert made.response_mask == [
        int(a == "m") for a, s in zip("mtmtmtm", made.response, strict=True) for _ in s.tokens
    ]


async def test_a_long_edited_observation_is_cut_as_the_loop_cuts(servers: LiveServers, tmp_path: Path) -> None:
    url = await shop(servers, tmp_path)
    point, loop = await point_of(url, tmp_path, 1, Edit("observation", "x" * 5000))
    made = await gone_on(url, point, loop, Told("Result=4"))
    assert len(made.segments[2].tokens) == loop.options.max_obs_length
    assert made.calls[0].truncated


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("<shop>a</shop> and more", "has text after its stop string: ' and more'"),
        ("x" * 2000, "has 2000 tokens, but the run's limits leave"),
    ],
)
async def test_an_action_that_the_model_could_not_write_is_refused(
    servers: LiveServers, tmp_path: Path, action: str, words: str
) -> None:
    url = await shop(servers, tmp_path)
    point, loop = await point_of(url, tmp_path, 2, Edit("action", action))
    with pytest.raises(ConfigError, match=words):
        await gone_on(url, point, loop, Told("Result=4"))


async def test_in_a_chat_the_template_closes_an_edited_turn_as_any_other() -> None:
    """The tokens are those of the conversation rendered at once, with the edited turn in its place."""
    tokenizer, row = ToyTokenizer(Template()), Problem(0, (), "sums", {})
    options = EpisodeOptions.load({"enable_mtrl": True, "action_stop_tokens": ["</a>"], "max_turns": 4})
    messages = [{"role": "user", "content": "1+1?"}]
    script = ScriptedEngine(tokenizer, ["<a>1</a>", "<a>2</a>", "three"])
    episode = Episode(script, ToyTools(lambda action, n: f"answer to {action}"), tokenizer, options)
    parent = await episode.run(render_prompt(tokenizer, messages))
    prompts, formats = PromptRenderer(tokenizer, options), LoopFormats(None)
    loop = RunLoop(Path(), tokenizer, options, Sampling(), prompts, formats, "auto", False)  # type: ignore[arg-type]
    model = Model(ScriptedEngine(tokenizer, ["done"]))
    continuation = Continuation(loop, model, ToyTools(lambda action, n: f"answer to {action}"))
    made = await continuation.run(BranchPoint(LOCATION, parent, row, 2, Edit("action", "<a>9</a>")), "t")
    for action in ("<a>1</a>", "<a>9</a>"):
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": f"answer to {action}"}]
    whole = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "done"}], add_generation_prompt=False
    )
    assert made.prompt_ids + made.response_ids == tokenizer.encode(whole[: whole.rindex(END) + len(END)])
    assert sum(made.response_mask) == len(tokenizer.encode("<a>1</a>")) + len(tokenizer.encode("done" + END))


async def test_variables_of_a_python_session_are_there(servers: LiveServers, tmp_path: Path) -> None:
    url = (await servers.start(load_tools("ipython_code"))).url
    turns = ["<python>x = [41]</python>", "<python>x.append(1); sum(x)</python>", "Result=42"]
    edit = Edit("action", "<python>x.append(2); sum(x)</python>")
    point, loop = await point_of(url, tmp_path, 2, edit, turns)
    made = await gone_on(url, point, loop, Told("Result=43"))
    assert point.trajectory.calls[1].observation == answer("42")
    assert made.calls[1].observation == answer("43")
