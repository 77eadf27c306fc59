"""The notebook front: on a scripted model, and on a small random model of transformers."""

from __future__ import annotations

import asyncio
import html
import importlib
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from live_server import LiveServers
from toy_environments import GuessEnvironment
from toy_tools import picture

from verl_tool.agent_loop.function_tools import FunctionTools
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.trajectory import Author, StopReason
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import ALL_FORMATS, HERMES, TRL
from verl_tool.formats.native import NATIVE
from verl_tool.notebook.text_environment import TextEnvironment
from verl_tool.notebook.text_history import TextHistory

FEW_SHOT = "13.1-3= <request><SimpleCalculatorTool>13.1-3<call>10.1<response> Result=10.1<submit>\n"
MARKERS = ("<request>", "<call>", "<response>", "<submit>", "</s>")


class SmallTokenizer:
    """transformers' interface over characters; the format's markers are single tokens."""

    eos_token_id = 4
    all_special_tokens = ("</s>",)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        pieces = re.findall("|".join(map(re.escape, MARKERS)) + "|.", text, re.DOTALL)
        return [MARKERS.index(p) if p in MARKERS else 10 + ord(p) for p in pieces]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return "".join(MARKERS[i] if i < 10 else chr(i - 10) for i in token_ids)


class Solver:
    """A model that calls the calculator for ``a+b=`` and submits what it answers."""

    def __init__(self, tokenizer: SmallTokenizer) -> None:
        self.tokenizer = tokenizer
        self.params: list[dict[str, Any]] = []

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        self.params.append(sampling_params)
        text = self.tokenizer.decode(prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        said = self.say(text.removeprefix(FEW_SHOT))
        return Generation(self.tokenizer.encode(said, add_special_tokens=False)[: sampling_params.get("max_tokens")])

    def say(self, text: str) -> str:
        task, _, rest = text.partition("=")
        if not rest:
            return f"<request><add>{task}<call>"
        return f"Result={rest.removesuffix('<response>').rpartition('<call>')[2]}<submit>"


def add(query: str) -> float:
    a, b = query.split("+")
    return float(a) + float(b)


def exact(segments: list[str], answers: list[str]) -> list[float]:
    return [float(s == f"Result={a}<submit>") for s, a in zip(segments, answers, strict=True)]


def environment(tools: Any = (add,), model: type[Solver] = Solver, **kwargs: Any) -> TextEnvironment:
    tokenizer = SmallTokenizer()
    return TextEnvironment(model(tokenizer), tokenizer, tools, exact, FEW_SHOT, **kwargs)


def text(env: TextEnvironment, ids: list[int]) -> str:
    return env.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_tasks_are_solved_with_the_tool_and_rewarded() -> None:
    env = environment(generation_kwargs={"temperature": 0.5})
    queries, responses, masks, rewards, histories = env.run(["1+2=", "3+4="], answers=["3.0", "8.0"])
    assert [text(env, q) for q in queries] == [FEW_SHOT + "1+2=", FEW_SHOT + "3+4="]
    assert text(env, responses[0]) == "<request><add>1+2<call>3.0<response>Result=3.0<submit>"
    assert [
        text(env, [t for t, m in zip(r, k, strict=True) if not m]) for r, k in zip(responses, masks, strict=True)
    ] == [
        "3.0<response>",
        "7.0<response>",
    ]
    assert rewards == [1.0, 0.0]
    assert [h.reward for h in histories] == rewards
    assert not histories[0].truncated
    assert env.model.params[0]["temperature"] == 0.5


class Delegator(Solver):
    """A model that delegates ``a+b+c=`` as a sum of two, and adds the rest to what it is answered."""

    def say(self, text: str) -> str:
        task, _, rest = text.partition("=")
        first, _, last = task.rpartition("+")
        if "+" not in first:
            return super().say(text)
        if not rest:
            return f"<request><delegate>{first}=<call>"
        return f"Result={float(rest.partition('Result=')[2].partition('<')[0]) + float(last)}<submit>"


def test_the_row_is_the_main_agents_and_the_record_has_the_sub_agents() -> None:
    env = environment(model=Delegator, subagents=True)
    queries, responses, masks, rewards, histories = env.run(["1+2+4="], answers=["7.0"])
    [child, main] = histories[0].trajectory.rows
    assert text(env, child.prompt_ids) == FEW_SHOT + "1+2="
    assert "<call>3.0<response>" in text(env, child.response_ids)
    assert queries == [main.prompt_ids]
    assert responses == [main.response_ids]
    assert "<add>" not in text(env, responses[0])
    assert "<call>3.0" not in text(env, responses[0])
    assert len(masks[0]) == len(responses[0])
    assert rewards == [1.0]


def test_trl_s_names_of_arguments_are_taken() -> None:
    texts = []
    for name in ("max_tool_reponse", "max_tool_response"):
        env = environment(**{name: 2})
        texts.append(text(env, env.run(queries=["1+2="], answers=["3.0"])[1][0]))
    assert texts[0] == texts[1]
    assert "3.0<response>" not in texts[0]  # cut, as it was told


def test_an_argument_under_both_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="tasks and queries are one argument"):
        environment().run(["1+1="], queries=["2+2="], answers=["2.0"])
    with pytest.raises(ConfigError, match="max_tool_response and max_tool_reponse are one argument"):
        environment(max_tool_response=5, max_tool_reponse=6)


@pytest.mark.parametrize("tasks", [None, "1+1=", [b"png"], [{"image": "a.png"}]])
def test_tasks_that_are_no_texts_are_refused(tasks: Any) -> None:
    with pytest.raises(ConfigError, match=r"list of tasks|carries text only"):
        environment().run(tasks, answers=["2.0"])


class Picture:
    """Stands for an image: what it is shows in the name of its class's package."""

    __module__ = "PIL.Image"


@pytest.mark.parametrize(
    ("given", "kind"), [(b"png", "bytes"), (Picture(), "Picture"), (["in words:", Picture()], "Picture")]
)
async def test_a_function_that_answers_with_an_image_is_told_what_to_do(given: object, kind: str) -> None:
    tools = FunctionTools({"plot": lambda query: given}, (TRL,), 100)
    with pytest.raises(ConfigError, match=f"the tool 'plot' answered with a {kind}.*return text: a caption"):
        await tools.call("t", "<request><plot>x<call>")


class ImageTokenizer(SmallTokenizer):
    """With Qwen's tokens of an image."""

    tokens: ClassVar = {"<|vision_start|>": "\ue000", "<|image_pad|>": "\ue001", "<|vision_end|>": "\ue002"}
    all_special_tokens = ("</s>", *tokens)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        for token, letter in self.tokens.items():
            text = text.replace(token, letter)
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], **kwargs: bool) -> str:
        text = super().decode(token_ids, **kwargs)
        for token, letter in self.tokens.items():
            text = text.replace(letter, token)
        return text


class Patches:
    """An image processor for which a pixel is a patch."""

    merge_size = 1

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: object) -> int:
        return height * width


class Looker(Solver):
    seen: Sequence[ImagePart] = ()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        self.seen = images
        return await super().generate(prompt_ids, sampling_params, request_id)


def test_a_function_may_answer_with_an_image() -> None:
    shown = picture(7, (3, 2))

    def plot(query: str) -> object:
        return [f"of {query}:", shown] if "+" in query else 3

    model = Looker(ImageTokenizer())
    env = TextEnvironment(model, ImageTokenizer(), {"add": plot}, prompt=FEW_SHOT, image_processor=Patches())
    *_, (history,) = env.run(["1+2="])
    assert model.seen == [shown]
    assert history.trajectory.visible_images == [shown]
    assert history.text.count("<|image_pad|>") == 1
    assert history.tokens.count(10 + 0xE001) == 6
    assert 'of 1+2:</span><img src="data:image/png;base64,' in history.to_html()
    with pytest.raises(ConfigError, match="the tool 'add' answered with an image, and this loop carries text only"):
        TextEnvironment(model, ImageTokenizer(), {"add": plot}, prompt=FEW_SHOT).run(["1+2="])


async def test_too_many_images_of_functions_are_a_fault() -> None:
    tools = FunctionTools({"plot": lambda query: [picture(1)] * 65}, (TRL,))
    with pytest.raises(ToolFault, match="65 images and audios in one observation; at most 64"):
        await tools.call("t", "<request><plot>x<call>")


async def test_it_runs_where_an_event_loop_runs_already() -> None:
    await asyncio.sleep(0)
    assert environment().run(["1+2="], answers=["3.0"])[3] == [1.0]
    with pytest.raises(ValueError, match="zip"):
        environment().run(["1+2="], answers=[])


def test_a_history_knows_its_parts() -> None:
    env = environment()
    queries, responses, masks, _, (history,) = env.run(["1+2="], answers=["3.0"])
    assert history.text == FEW_SHOT + "1+2=<request><add>1+2<call>3.0<response>Result=3.0<submit>"
    assert [history.text[a:b] for a, b in history.text_spans][2:] == ["3.0<response>", "Result=3.0<submit>"]
    assert history.tokens == queries[0] + responses[0]
    assert [text(env, history.tokens[a:b]) for a, b in history.token_spans][3:] == ["Result=3.0<submit>"]
    assert history.token_masks == [0] * len(queries[0]) + masks[0]
    assert history.system_spans == [True, False, True, False]
    assert history.last_text_segment == "Result=3.0<submit>"
    assert history.completed
    assert history.fault is None


def test_turns_are_counted_as_in_trl() -> None:
    class Asking(Solver):
        def say(self, text: str) -> str:
            return "<request><add>1+1<call>"

    _, _, _, _, (history,) = environment(model=Asking, max_turns=2).run(["1+1="], answers=[""])
    assert history.trajectory.stop is StopReason.MAX_TURNS
    assert [s.author for s in history.trajectory.response] == [Author.MODEL, Author.TOOL] * 2
    assert history.truncated


def test_long_histories_are_cut() -> None:
    class Talking(Solver):
        def say(self, text: str) -> str:
            return "blah" * 100

    _, responses, _, _, (history,) = environment(model=Talking, max_length=120).run(["1+1="], answers=[""])
    assert len(history.tokens) == 120
    assert history.truncated
    assert len(responses[0]) < 120


@pytest.mark.parametrize(
    ("tools", "answer"),
    [
        ({"add": lambda query: "x" * 200}, "x" * 97 + "..."),
        ([lambda query: 1], "Unknown tool add. Known: <lambda>."),
        ({"add": lambda query: 1 / 0}, "Tool error: division by zero"),
    ],
)
def test_what_a_function_gives_is_an_observation(tools: Any, answer: str) -> None:
    _, _, _, _, (history,) = environment(tools).run(["1+2="], answers=[""])
    assert history.trajectory.segments[2].text == answer + "<response>"


async def test_functions_take_the_arguments_of_json_calls() -> None:
    def power(base: int, exponent: int) -> int:
        return base**exponent

    tools = FunctionTools([power], [HERMES])
    call = '<tool_call>{"name": "power", "arguments": {"base": 2, "exponent": 5}}</tool_call>'
    result = await tools.call("t", f"{call} and {call}")
    assert result.valid
    assert result.observation.count("32") == 2
    broken = await tools.call("t", '<tool_call>{"name": "power", "arg</tool_call>')
    assert not broken.valid or "32" not in broken.observation
    assert (await tools.call("t", "no call")).valid is False
    assert (await tools.call("t", call, finish=True)).observation == ""


def convert(value: float, unit: str) -> str:
    """Converts a length from km to miles, or back."""
    return f"{value * 1.609 if unit == 'mi' else value / 1.609:.1f} {'km' if unit == 'mi' else 'mi'}"


CALLS = {
    "trl": "<request><convert>10, mi<call>",
    "fenced": "```convert\n10, mi\n```\n```output",
    "tool_tags": '<tool>{"name": "convert", "arguments": {"value": 10, "unit": "mi"}}</tool>',
    "hermes": '<tool_call>{"name": "convert", "arguments": {"value": 10, "unit": "mi"}}</tool_call>',
    "json": '{"name": "convert", "arguments": {"value": "10", "unit": "mi"}}',
    "tags": '<convert>{"value": 10, "unit": "mi"}</convert>',
    "python_tags": "<python>10, mi</python>",
    "openrlhf": "<PYTHON>10, mi</PYTHON>",
    "search_tags": "<search>10, mi</search>",
    **{
        fmt.name: fmt.write_call("convert", {"value": 10, "unit": "mi"}) + (fmt.stop[0] if fmt.name == "glm" else "")
        for fmt in NATIVE
    },
}
"""A call of a function of two arguments, in each format."""


def test_every_format_is_tried() -> None:
    assert set(CALLS) == {fmt.name for fmt in ALL_FORMATS} | {"tags"}


class Converting(Solver):
    """Calls, and answers with what it read behind its call; a turn of a chat ends with an end token."""

    call, turn_end = "", ""

    def say(self, text: str) -> str:
        _, called, observation = text.rpartition(self.call)
        return (
            f"It is {'16.1 km' if '16.1 km' in observation else 'unknown'}.</s>"
            if called
            else self.call + self.turn_end
        )


class ChatTokenizer(SmallTokenizer):
    """With a template that closes each message by the end token."""

    chat_template = "{role}: {content}</s>"

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        messages = "".join(f"\n{m['role']}: {m['content']}</s>" for m in conversation)
        return messages + ("\nassistant: " if kwargs["add_generation_prompt"] else "")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_two_arguments_is_called_in_every_format(name: str, chat: bool) -> None:
    tokenizer = ChatTokenizer()
    model = Converting(tokenizer)
    model.call, model.turn_end = CALLS[name], "</s>" if chat else ""
    functions = dict.fromkeys(("convert", "python", "PYTHON", "search"), convert)
    if name in ("json", "llama3", "mistral") and not chat:
        with pytest.raises(ConfigError, match=rf"'{name}' has no stop string .* set chat=True"):
            TextEnvironment(model, tokenizer, functions, formats=name, chat=chat)
        return
    env = TextEnvironment(model, tokenizer, functions, None, "Convert.", formats=name, chat=chat, tool_schemas="none")
    (query,), _, (mask,), _, (history,) = env.run(["How far?"])
    assert history.text.endswith("It is 16.1 km.</s>")
    assert text(env, query) == (
        "\nsystem: Convert.</s>\nuser: How far?</s>\nassistant: " if chat else "Convert.How far?"
    )
    authors = [segment.author for segment in history.trajectory.response]
    assert authors[0] is authors[-1] is Author.MODEL
    assert Author.TOOL in authors
    written = "".join(s.text for s in history.trajectory.response if s.author is Author.MODEL)
    assert sum(mask) == len(tokenizer.encode(written, add_special_tokens=False))
    assert not history.truncated


class Guesser(Solver):
    def say(self, text: str) -> str:
        return ("7" if "No." in text else "4") + "</s>"


class Crasher(Solver):
    def say(self, text: str) -> str:
        return "crash</s>"


async def test_tasks_begin_in_environments_which_give_the_reward() -> None:
    servers = LiveServers()
    server = await servers.start([GuessEnvironment()])
    tokenizer = ChatTokenizer()
    env = TextEnvironment(Guesser(tokenizer), tokenizer, server.url, prompt="Be brief.", chat=True, max_turns=2)
    games = [{"secret": 7}, {"secret": 5}, {"secret": 4}]
    queries, _, masks, rewards, histories = await asyncio.to_thread(env.run, [""] * 3, environments=games)
    assert rewards == [1.0, 0.0, 1.0]
    assert text(env, queries[0]) == "\nsystem: Be brief.</s>\nuser: Guess a number below 10.</s>\nassistant: "
    assert [sum(mask) for mask in masks] == [4, 4, 2]
    assert [history.trajectory.num_turns for history in histories] == [2, 2, 1]
    crash = TextEnvironment(Crasher(tokenizer), tokenizer, server.url, chat=True, fault_reward=-1.0)
    _, _, masks, rewards, histories = await asyncio.to_thread(crash.run, [""], environments=[{"secret": 7}])
    assert (rewards, histories[0].trajectory.excluded) == ([-1.0], None)
    assert sum(masks[0]) > 0
    for arguments in ({"tools": [add]}, {"tools": server.url, "chat": False}):
        with pytest.raises(ConfigError, match="environments need chat=True"):
            TextEnvironment(Guesser(tokenizer), tokenizer, **arguments).run([""], environments=[{}])
    await servers.stop()


class ToldTokenizer(ChatTokenizer):
    """With a template that takes tools, for Hermes calls."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> str:
        tools = "".join(f"{tool['function']}" for tool in kwargs["tools"] or [])
        told = f"tools: {tools}<tool_call></tool_call>" if tools else ""
        return told + super().apply_chat_template(conversation, **kwargs)


@pytest.mark.parametrize("name", ["hermes", "tags"])
@pytest.mark.parametrize("kind", [ChatTokenizer, ToldTokenizer])
def test_a_chat_tells_of_its_functions(kind: type[ChatTokenizer], name: str) -> None:
    """By the template, if it takes tools and teaches calls in the chosen format."""
    tokenizer = kind()
    model = Converting(tokenizer)
    model.call, model.turn_end = CALLS[name], "</s>"
    env = TextEnvironment(model, tokenizer, [convert], None, "Convert.", formats=name, chat=True)
    (query,), _, _, _, (history,) = env.run(["How far?"])
    usage = env.usage().strip()
    by_template = kind is ToldTokenizer and name == "hermes"
    assert text(env, query).count("Converts a length") == 1
    assert (f"system: Convert.\n\n{usage}</s>" in text(env, query)) is not by_template
    assert text(env, query).startswith("tools: ") is by_template
    assert not history.truncated


def test_a_text_has_no_place_for_schemas() -> None:
    with pytest.raises(ConfigError, match=r"tool_schemas=\('add',\) with chat=False.*chat=True"):
        environment(tool_schemas=("add",))


@pytest.mark.parametrize("name", CALLS)
def test_a_prompt_tells_how_to_call_in_the_first_format(name: str) -> None:
    tokenizer = ChatTokenizer()
    env = TextEnvironment(Solver(tokenizer), tokenizer, [convert], formats=[name, "hermes"], chat=True)
    assert "Converts a length" in env.usage()
    assert {"hermes": "<tool_call>", "trl": "<request><convert>", "fenced": "```convert"}.get(
        name, "convert"
    ) in env.usage()


@pytest.mark.parametrize(
    ("tools", "formats", "words"),
    [
        ([add], [], "formats is empty"),
        ([add], "xml", "format 'xml' is unknown; known: .*fenced"),
        ([lambda query: query], "tags", "'<lambda>' cannot be called by a tag"),
        ("http://127.0.0.1:1", "tags", r"http://127\.0\.0\.1:1 does not tell them: .* formats=\['<calculator>'\]"),
    ],
)
def test_formats_that_cannot_serve_are_refused(tools: Any, formats: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        environment(tools, formats=formats)


async def test_a_coroutine_function_is_awaited() -> None:
    async def later(query: str) -> str:
        await asyncio.sleep(0)
        return query[::-1]

    assert (await FunctionTools([later], [TRL]).call("t", "<request><later>12<call>")).observation == "21<response>"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "convert", "arguments": {"value": "ten", "unit": "mi"}}', "value: Input should be a valid number"),
        ('{"name": "convert", "arguments": {"value": 10}}', "unit: Missing required argument"),
        ('{"name": "other", "arguments": {}}', "Unknown tool other. Known: convert."),
    ],
)
async def test_a_call_that_does_not_fit_its_function_is_told_and_not_valid(call: str, words: str) -> None:
    result = await FunctionTools([convert], [HERMES]).call("t", f"<tool_call>{call}</tool_call>")
    assert words in result.observation
    assert not result.valid


async def test_objects_that_can_be_called_are_named_by_their_class() -> None:
    class SimpleCalculatorTool:
        def __call__(self, query: str) -> str:
            return query[::-1]

    tools = FunctionTools([SimpleCalculatorTool()], [TRL])
    result = await tools.call("t", "<request><SimpleCalculatorTool>12<call>")
    assert result.observation == "21<response>"


def test_text_and_tokens_are_shown_in_colours(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delenv("NO_COLOR", raising=False)
    env = environment({"add": lambda query: "3.0 \x1b[2J <b>"})
    _, _, _, _, (history,) = env.run(["1+2="], answers=[""])
    history.show_text(show_legend=True)
    out = capsys.readouterr().out
    assert "\x1b[2J" not in out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert "<call>3.0 ␛[2J" in plain
    assert "Reward: 0.0" in plain
    assert "(Prompt|Model|Tool|Template|Reward)" in plain
    assert len(set(re.findall(r"\x1b\[[0-9;]*m", out))) >= 4
    history.show_tokens(env.tokenizer)
    tokens = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "<request> < a d d > 1 + 2 <call>" in tokens
    assert "⏎" in tokens


def test_a_notebook_gets_html_with_the_text_escaped() -> None:
    env = environment({"add": lambda query: "<script>alert(1)</script>"})
    _, _, _, _, (history,) = env.run(["1+2="], answers=[""])
    shown = history._repr_html_()
    assert "<script>" not in shown
    assert re.sub("<[^>]*>", "", shown) == html.escape(history.text + "\nReward: 0.0", quote=True)
    assert len(set(re.findall("background:#([0-9a-f]+)", shown))) == 4
    assert shown.count("<span") < len(history.tokens) <= history.to_html(env.tokenizer).count("<span")


def test_without_a_reward_function_rewards_are_zero() -> None:
    tokenizer = SmallTokenizer()
    assert TextEnvironment(Solver(tokenizer), tokenizer, [add]).run(["1+2="])[3] == [0.0]


def test_torch_is_not_imported_for_a_generator() -> None:
    before = "torch" in sys.modules
    environment().run(["1+2="], answers=[""])
    assert ("torch" in sys.modules) == before


# A random model with real weights: what it says is noise, what is recorded must be exact.


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("transformers")
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def tokenizer(torch: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = importlib.import_module("transformers")
    letters = [*MARKERS, *map(chr, range(32, 127)), "\n"]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({t: i for i, t in enumerate(letters)}, "?"))
    core.add_tokens(list(MARKERS[:4]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")


@pytest.fixture(scope="module")
def model(torch: Any, tokenizer: Any) -> Any:
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.eos_token_id,
    )
    return transformers.Qwen2ForCausalLM(config).eval()


@pytest.fixture
def calling(model: Any, tokenizer: Any, torch: Any) -> Any:
    """The model with ``<call>`` and ``<submit>`` made likely, so that all kinds of turns happen."""
    with torch.no_grad():
        head = torch.nn.Linear(32, len(tokenizer), bias=True)
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        for marker, bias in (("<call>", 2.5), ("<submit>", 1.0), ("</s>", 1.0)):
            head.bias[tokenizer.convert_tokens_to_ids(marker)] = bias
        model.lm_head = head
    return model


def test_a_batch_is_generated_and_recorded_exactly(calling: Any, tokenizer: Any, torch: Any) -> None:
    torch.manual_seed(1)
    env = TextEnvironment(
        calling,
        tokenizer,
        {"add": add},
        lambda segments: [float(len(s)) for s in segments],
        FEW_SHOT,
        max_turns=3,
        generation_kwargs={"do_sample": True, "max_new_tokens": 24, "top_k": 0},
    )
    tasks = [f"{i}+{i * i}=" for i in range(12)]
    queries, responses, masks, _, histories = env.run(tasks)
    assert all(isinstance(t, torch.Tensor) for t in (*queries, *responses, *masks))
    assert tokenizer.decode(queries[3]) == FEW_SHOT + "3+9="
    stops = {h.trajectory.stop for h in histories}
    assert {StopReason.MAX_TURNS, StopReason.TOOL_DONE, StopReason.ANSWERED} <= stops
    for history in histories:
        check_exact(calling, torch, history)


def check_exact(model: Any, torch: Any, history: TextHistory) -> None:
    trajectory = history.trajectory
    with torch.no_grad():
        logits = model(torch.tensor([history.tokens])).logits[0]
    start = len(trajectory.prompt_ids)
    exact_log_probs = logits.log_softmax(-1)[start - 1 : -1]
    log_probs = trajectory.response_log_probs
    assert log_probs is not None
    for i, (token, mask) in enumerate(zip(trajectory.response_ids, trajectory.response_mask, strict=True)):
        expected = exact_log_probs[i, token].item() if mask else 0.0
        assert log_probs[i] == pytest.approx(expected, abs=1e-4)
    for segment in trajectory.response:
        if segment.author is Author.MODEL:
            body = segment.text.rstrip()
            ends = [body.find(m) + len(m) for m in ("<call>", "<submit>", "</s>") if m in body]
            assert len(segment.tokens) <= 24
            assert not ends or min(ends) == len(body)


def test_an_engines_parameter_is_refused(model: Any, tokenizer: Any) -> None:
    module = importlib.import_module("verl_tool.agent_loop.generators.transformers_generator")
    hf = importlib.import_module("verl_tool.agent_loop.tokenizer").HFTokenizer(tokenizer)
    with pytest.raises(ValueError, match="sampling parameter 'best_of' is an engine's"):
        asyncio.run(module.TransformersGenerator(model, hf).generate([1], {"best_of": 2}, "r"))


@pytest.mark.parametrize("named", ["one", "list", "none"])
def test_end_and_padding_tokens_are_those_of_the_arguments(model: Any, tokenizer: Any, torch: Any, named: str) -> None:
    """TRL passes ``eos_token_id=-1`` so that only its stop strings end a turn."""
    ends = {"one": 5, "list": [5, 6], "none": -1}[named]
    kwargs = {"eos_token_id": ends, "pad_token_id": 0, "max_new_tokens": 12, "do_sample": True, "top_k": 0}
    env = TextEnvironment(model, tokenizer, {"add": add}, None, FEW_SHOT, generation_kwargs=kwargs)
    torch.manual_seed(3)
    wanted = {"one": {5}, "list": {5, 6}, "none": set()}[named]
    *_, histories = env.run([f"{i}+1=" for i in range(24)])
    turns = [s.tokens for h in histories for s in h.trajectory.response if s.author is Author.MODEL]
    assert not any(wanted & set(turn[:-1]) for turn in turns)
    assert any(wanted & set(turn[-1:]) for turn in turns) == bool(wanted)
    assert any(tokenizer.eos_token_id in turn[:-1] for turn in turns)  # it is no end token now


def test_a_model_with_a_value_head_is_the_model_within(model: Any, tokenizer: Any) -> None:
    class WithValueHead:
        pretrained_model = model

    env = TextEnvironment(WithValueHead(), tokenizer, {"add": add}, None, FEW_SHOT, max_turns=1)
    assert env.model is model
    assert len(env.run(["1+1="])[1][0]) > 0


def test_what_goes_wrong_in_the_model_reaches_the_caller(model: Any, tokenizer: Any) -> None:
    env = TextEnvironment(model, tokenizer, [add], generation_kwargs={"no_such_argument": 1})
    with pytest.raises(ValueError, match="no_such_argument"):
        env.run(["1+1="])
