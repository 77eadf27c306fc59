"""The prompts of requests: for a row of the data they are the training's, token for token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
arrow = pytest.importorskip("pyarrow")

import pyarrow.parquet as parquet  # noqa: E402
from live_server import LiveServers  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from real_tokenizers import HERMES_TEMPLATE, PLAIN_TEMPLATE, chat_tokenizer  # noqa: E402
from run_folders import MODEL  # noqa: E402
from scripted_engine import RuleEngine, plain_tokenizer  # noqa: E402
from toy_mcp import tools_of, toy  # noqa: E402
from toy_mcp_server import TEXT  # noqa: E402
from verl.utils.dataset.rl_dataset import RLHFDataset  # noqa: E402
from verl_loop import ScriptedEngine, composed, loop_of  # noqa: E402

from eval_service.evaluation.asking import OWNER, Asker, Asking  # noqa: E402
from eval_service.evaluation.dataset import read_problems  # noqa: E402
from eval_service.model.run_config import read_run  # noqa: E402
from eval_service.model.tokenizer import load_tokenizer  # noqa: E402
from eval_service.openai.plan import chat_plan  # noqa: E402
from eval_service.openai.requests import ChatRequest, read_request  # noqa: E402
from eval_service.openai.response_builder import ResponseBuilder  # noqa: E402
from eval_service.service import GenerationJob, Service  # noqa: E402
from verl_tool.agent_loop.options import EpisodeOptions  # noqa: E402
from verl_tool.agent_loop.verl.config import options_in  # noqa: E402
from verl_tool.checks.row_files import row_files  # noqa: E402
from verl_tool.client import ToolClient  # noqa: E402
from verl_tool.formats import ALL_FORMATS, HERMES  # noqa: E402
from verl_tool.formats.find import find_calls  # noqa: E402
from verl_tool.http.messages import HttpError  # noqa: E402
from verl_tool.notebook.text_environment import TextEnvironment  # noqa: E402
from verl_tool.servers.tools import load_tools  # noqa: E402
from verl_tool.trainer.run_folder.saved_config import save_config  # noqa: E402
from verl_tool.trainer.tool_prompts import attach_tool_descriptions  # noqa: E402
from verl_tool.util.json_text import encode_json  # noqa: E402

AGENT = "actor_rollout_ref.agent"
COUNTER = str(Path(__file__).parents[2] / "servers/data/counter.py")
ASKED = [{"role": "user", "content": "What is 13.1-3?"}]
NOBODY = "http://127.0.0.1:9"
BRIEF = [{"role": "system", "content": "Be brief."}, *ASKED]
ROWS: list[dict[str, Any]] = [
    {"prompt": ASKED, "extra_info": {"index": 0, "tools_kwargs": {"tools": None}, "tool_selection": None}},
    {"prompt": BRIEF, "extra_info": {"index": 1, "tools_kwargs": {"tools": ["calculator"]}, "tool_selection": None}},
    {"prompt": ASKED, "extra_info": {"index": 2, "tools_kwargs": {"tools": []}, "tool_selection": None}},
    {"prompt": BRIEF, "extra_info": {"index": 3, "tools_kwargs": {"tools": None}, "tool_selection": ["counter"]}},
    {
        "prompt": ASKED,
        "extra_info": {"index": 4, "tools_kwargs": {"tools": ["counter"]}},
        "use_tool": False,
        "max_turns": 3,
    },
]
TOLD = [["calculator", "counter"], ["calculator"], [], ["counter"], []]
"""Of which tools each row's prompt tells."""
INLINE = (f"{AGENT}.enable_mtrl=false", f"{AGENT}.action_stop_tokens=['</tool_call>']")
MODES = {
    "chat": ((f"{AGENT}.enable_mtrl=true",), [True] * 5),
    "by text": ((f"{AGENT}.enable_mtrl=true", f"{AGENT}.tool_prompt=system"), [True] * 5),
    "inline": (INLINE, [False, True, True, True, True]),
    "named": ((*INLINE, f"{AGENT}.tool_schemas=[counter]"), None),
    "none": ((f"{AGENT}.enable_mtrl=true", f"{AGENT}.tool_schemas=none"), [False] * 5),
}


def written_run(folder: Path, template: str, url: str, *overrides: str, asked: list[dict[str, Any]] = ROWS) -> Any:
    """A run's folder with rows and a tokenizer, and its config."""
    tokenizer = chat_tokenizer(template)
    tokenizer.save_pretrained(folder / MODEL)
    (folder / MODEL / "config.json").write_text("{}")
    (folder / MODEL / "model.safetensors").write_bytes(b"x")
    rows = [
        {"data_source": "d", "reward_model": {"ground_truth": "1"}, "use_tool": True, "max_turns": None, **row}
        for row in asked
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    config = composed(
        *(f"run_dir={folder}", f"data.train_files={folder}/rows.parquet", f"data.val_files={folder}/rows.parquet"),
        *(
            "data.max_prompt_length=4096",
            "data.max_response_length=64",
            f"actor_rollout_ref.model.path={folder}/{MODEL}",
        ),
        *(
            f"{AGENT}.tool_server_url={url}",
            "actor_rollout_ref.rollout.name=vllm",
            "platform=cpu",
            "data.filter_overlong_prompts=false",
        ),
        *overrides,
    )
    OmegaConf.save(config, folder / "config.yaml")
    return config, tokenizer


async def trained_prompts(folder: Path, config: Any, tokenizer: Any) -> list[list[int]]:
    """What the training's engine is fed for each row, in the order of the file."""
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    save_config(config)
    rows = RLHFDataset(str(folder / "rows.parquet"), tokenizer, config.data)
    engine = ScriptedEngine(tokenizer, *["no call"] * len(rows))
    loop = loop_of(config, tokenizer, engine)
    for i in range(len(rows)):
        await loop.run({}, **rows[i])
    return [asked[1] for asked in engine.asked]


async def served_prompts(folder: Path, client: ToolClient) -> list[list[int]]:
    """What the endpoint's engine is fed where the evaluator asks for each row."""
    run = read_run(folder)
    engine = RuleEngine(plain_tokenizer(), lambda text: "", max_model_len=8192)
    tokenizer = load_tokenizer(run.model, chat_template_kwargs=run.chat_template_kwargs)
    engine.vocab_size = tokenizer.vocab_size
    service = Service(engine, tokenizer, client, run.options, tool_descriptions=run.tool_descriptions)
    asker = Asker(Asking("http://127.0.0.1:1/v1", model=OWNER))
    asker.gives_trajectories = True
    prompts = []
    for problem in read_problems(folder / "rows.parquet"):
        body = asker._request(problem, 0)
        body |= body.pop("extra_body")
        plan = await chat_plan(read_request(encode_json(body), ChatRequest), service, ResponseBuilder.of_chat(OWNER))
        assert plan.jobs[0].max_turns == problem.max_turns == (3 if problem.index == 4 else None)
        prompts.append(list(plan.jobs[0].prompt_ids))
    return prompts


@pytest.mark.parametrize(
    ("template", "mode"),
    [*((HERMES_TEMPLATE, mode) for mode in MODES), (PLAIN_TEMPLATE, "chat"), (PLAIN_TEMPLATE, "inline")],
)
async def test_the_prompts_of_a_run_that_is_served_are_those_of_its_training(
    template: str, mode: str, tmp_path: Path, servers: LiveServers
) -> None:
    tool_server = await servers.start(load_tools("calculator," + COUNTER))
    overrides, told = MODES[mode]
    config, tokenizer = written_run(tmp_path, template, tool_server.url, *overrides)
    trained = await trained_prompts(tmp_path, config, tokenizer)
    async with ToolClient(tool_server.url, timeout=10) as client:
        assert await served_prompts(tmp_path, client) == trained
    for i, ids in enumerate(trained):
        text = tokenizer.decode(ids)
        expected = [n for n in TOLD[i] if n == "counter"] if told is None else TOLD[i] if told[i] else []
        assert [name for name in ("calculator", "counter") if name in text] == expected


async def test_tools_of_an_mcp_server_are_told_alike_and_called_in_training_endpoint_and_notebook(
    tmp_path: Path, servers: LiveServers
) -> None:
    tool_server = await servers.start(await tools_of(toy(stateful=False)))
    chat = ("data.max_response_length=512", *(f"{AGENT}.{o}" for o in ("enable_mtrl=true", "formats=[hermes]")))
    config, tokenizer = written_run(tmp_path, HERMES_TEMPLATE, tool_server.url, *chat, asked=[{"prompt": ASKED}])
    turns = [HERMES.write_call("mcp__toy__echo", {"text": "hi"}), "It said hi."]
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    save_config(config)
    engine = ScriptedEngine(tokenizer, *(turn + tokenizer.eos_token for turn in turns))
    output = await loop_of(config, tokenizer, engine).run({}, raw_prompt=ASKED)
    trained = output.extra_fields["trajectory"]
    prompt = engine.asked[0][1]
    assert json.dumps(TEXT) in tokenizer.decode(prompt)

    async with ToolClient(tool_server.url, timeout=10) as client:
        assert await served_prompts(tmp_path, client) == [prompt]
        run = read_run(tmp_path)
        model = RuleEngine(plain_tokenizer(), lambda text: turns["<tool_response>" in text], max_model_len=8192)
        model.tokenizer = chosen = load_tokenizer(run.model)
        model.vocab_size = chosen.vocab_size
        service = Service(model, chosen, client, run.options, tool_descriptions=run.tool_descriptions)
        served = await service.run(GenerationJob("served", prompt))

    how: dict[str, Any] = {"chat": True, "formats": "hermes", "generation_kwargs": {"max_tokens": 256}}
    notebook = TextEnvironment(model, tokenizer, tool_server.url, **how)
    [history] = (await asyncio.to_thread(notebook.run, [ASKED[0]["content"]]))[-1]
    for trajectory in (trained, served, history.trajectory):
        assert trajectory.prompt_ids == prompt
        [call] = trajectory.calls
        assert (call.valid, call.fault) == (True, None)
        assert "echo: hi" in call.observation


async def test_a_run_tells_what_its_training_told_though_its_server_says_other_things_now(
    tmp_path: Path, servers: LiveServers
) -> None:
    before = await servers.start(load_tools("calculator," + COUNTER))
    config, tokenizer = written_run(tmp_path, HERMES_TEMPLATE, before.url, *MODES["chat"][0])
    trained = await trained_prompts(tmp_path, config, tokenizer)
    now = await servers.start(
        [load_tools(COUNTER)[0], type(load_tools("calculator")[0])(description="Costs ${money}.")]
    )
    async with ToolClient(now.url, timeout=10) as client:
        assert await served_prompts(tmp_path, client) == trained


@pytest.mark.parametrize("server_tells", [True, False])
async def test_a_run_finds_the_calls_that_its_training_found_whatever_its_server_says_now(
    server_tells: bool, tmp_path: Path, servers: LiveServers
) -> None:
    before = (await servers.start(load_tools("calculator"))).url if server_tells else NOBODY
    config, tokenizer = written_run(tmp_path, HERMES_TEMPLATE, before, *MODES["none"][0], asked=ROWS[:1])
    config.actor_rollout_ref.agent.tool_call_max_retries = 0
    await asyncio.to_thread(attach_tool_descriptions, config, options_in(config), row_files(config))
    save_config(config)
    turn = "<calculator>1</calculator><counter></counter>"
    trained = loop_of(config, tokenizer, ScriptedEngine(tokenizer))._worker.formats.all
    assert [call.name for call in find_calls(turn, trained)] == (["calculator"] if server_tells else [])
    now = await servers.start(load_tools("calculator," + COUNTER))
    run = read_run(tmp_path)
    async with ToolClient(now.url, timeout=10) as client:
        engine = RuleEngine(plain_tokenizer(), lambda text: "")
        service = Service(engine, plain_tokenizer(), client, run.options, tool_descriptions=run.tool_descriptions)
        assert await service.formats_of(None) == trained
        plain = Service(engine, plain_tokenizer(), client, run.options)
        assert [call.name for call in find_calls(turn, await plain.formats_of(None))] == ["calculator", "counter"]
        assert [call.name for call in find_calls(turn, await plain.formats_of(("counter",)))] == ["counter"]
        assert await plain.formats_of(()) == ALL_FORMATS


async def test_requests_are_answered_where_the_server_does_not_tell_its_tools() -> None:
    options = EpisodeOptions(tool_schemas="none", action_stop_tokens=("</a>",), tool_server_url=NOBODY)
    async with ToolClient(NOBODY, timeout=5, max_retries=0) as client:
        asked = []
        tell = client.tools
        client.tools = lambda: asked.append(1) or tell()  # type: ignore[method-assign,func-returns-value]
        service = Service(RuleEngine(plain_tokenizer(), lambda text: ""), plain_tokenizer(), client, options)
        found = await asyncio.gather(*(service.formats_of(None) for _ in range(5)))
    assert found == [ALL_FORMATS] * 5
    assert len(asked) == 1, "it is not asked again for a while"


async def test_a_request_narrows_what_its_prompt_tells_and_unknown_tools_are_named(
    tmp_path: Path, servers: LiveServers
) -> None:
    tool_server = await servers.start(load_tools("calculator," + COUNTER))
    written_run(tmp_path, HERMES_TEMPLATE, tool_server.url, *MODES["chat"][0])
    run = read_run(tmp_path)
    engine = RuleEngine(plain_tokenizer(), lambda text: "")
    tokenizer = load_tokenizer(run.model)
    engine.vocab_size = tokenizer.vocab_size
    async with ToolClient(tool_server.url, timeout=10) as client:
        service = Service(engine, tokenizer, client, run.options)

        async def prompt(**fields: Any) -> str:
            request = ChatRequest.model_validate({"model": "m", "messages": ASKED, **fields})
            plan = await chat_plan(request, service, ResponseBuilder.of_chat("m"))
            return tokenizer.decode(plan.jobs[0].prompt_ids)

        def named(name: str) -> list[dict[str, Any]]:
            return [{"type": "function", "function": {"name": name}}]

        told = await prompt()
        assert "calculator" in told
        assert "counter" in told
        narrowed = await prompt(tools=named("counter"))
        assert ("counter" in narrowed, "calculator" in narrowed) == (True, False)
        bare = await prompt(tools=[])
        assert bare == await prompt(tool_choice="none")
        assert "counter" not in bare
        with pytest.raises(HttpError, match="tool 'nope' is unknown; known: calculator, counter") as error:
            await prompt(tools=named("nope"))
        assert (error.value.status, error.value.field) == (400, "tools")
        limit = len(tokenizer.encode(bare))
        service.options = run.options.model_copy(update={"max_prompt_length": limit})
        assert await prompt(tools=[]) == bare
        with pytest.raises(
            HttpError, match=rf"\d+ tokens, what it tells of 2 tool.* at most {limit} here \(max_prompt_le"
        ):
            await prompt()
