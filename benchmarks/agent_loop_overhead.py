"""What the agent loop itself costs, next to verl's own `ToolAgentLoop`.

    python benchmarks/agent_loop_overhead.py --json outputs/benchmarks/agent_loop_overhead.json

Both loops run the same conversations in one process: the engine is a stub that answers at once with tokens made
beforehand, the tool a function that answers at once in the same process. What is left is the loop's own work: chat
template, tokenizing, finding calls, masks, records. Every trajectory is a prompt, ``--turns`` turns of the model with a
Hermes call each, their results, and an answer. Trajectories run ``--concurrency`` at a time. CPU time is that of the
whole process, threads included; the two loops take turns, and each figure is the median of ``--repeats``.

verl's loop is measured both ways that verl 0.9.0 can put turns together: rendered one by one (its default), and by its
continuous-token builder, which is all that verl 0.9.1 has. The memory of ``--live`` trajectories that all wait for
their last turn is measured in a process of its own for each loop.

With ``--image-side`` each result also holds a JPEG of so many pixels a side that nobody has seen before: verl's tool
gives its pixels, as verl wants them, ours its file. It becomes 64 tokens. Memory is not measured then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from hydra import compose, initialize_config_dir
from PIL import Image
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, DictConfigWrap, ToolListWrap
from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.verl.agent_loop import VerlToolAgentLoop
from verl_tool.content.parts import ImagePart, encode_image, read_media
from verl_tool.formats.hermes import HermesFormat
from verl_tool.protocol import StepResult
from verl_tool.trainer import main_ppo

OURS, BY_TURN, CONTINUOUS = "verl-tool", "verl, turn by turn", "verl, continuous tokens"
# Later versions put turns together in one way only, and have no option for it.
LOOPS = (OURS, BY_TURN, CONTINUOUS) if version("verl") == "0.9.0" else (OURS, CONTINUOUS)
THOUGHT = "The two numbers must be added before anything else can be said about them. "
RESULT = "The result of the calculation is 42. " * 4
QUESTION = "Please add the numbers that follow, one pair after the other, and tell the sum at the end. " * 12
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@dataclass(frozen=True)
class Cost:
    """What one loop needs."""

    loop: str
    turns: int
    tokens: int
    """Of one trajectory."""
    cpu_ms_per_turn: float
    wall_ms_per_turn: float


@dataclass(frozen=True)
class Memory:
    """What one live trajectory holds in one loop."""

    loop: str
    live: int
    tokens: int
    kib_each: float


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that has seen the benchmark's texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator([THOUGHT, RESULT, QUESTION, json.dumps(SCHEMA), "assistant\nuser\ntool\n"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=SPECIALS[:1],
        chat_template=CHATML,
    )


class Engine:
    """verl's engine client: answers at once, the same lines in every trajectory. Its last line may be held back."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: int) -> None:
        call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 41}}\n</tool_call><|im_end|>'
        lines = [THOUGHT * 8 + call] * turns + [THOUGHT + "The sum is 42.<|im_end|>"]
        self._lines = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
        self._said: dict[str, int] = {}
        self._last_turn = asyncio.Event()
        self._last_turn.set()
        self._waiting = 0
        self._all_wait = asyncio.Event()

    async def hold(self, trajectories: int) -> None:
        """Answer no last turn from now on; return when so many wait for theirs."""
        self._last_turn.clear()
        self._waiting = trajectories
        await self._all_wait.wait()

    def let_go(self) -> None:
        """Answer again."""
        self._last_turn.set()

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        said = self._said.get(request_id, 0)
        self._said[request_id] = said + 1
        if said + 1 == len(self._lines):
            del self._said[request_id]
            self._waiting -= 1
            if self._waiting == 0:
                self._all_wait.set()
            await self._last_turn.wait()
        ids = list(self._lines[said])
        return TokenOutput(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"min_global_steps": 0, "max_global_steps": 0},
        )


class Pictures:
    """JPEGs with the same pixels, of which each is a file of its own."""

    def __init__(self, side: int) -> None:
        noise = np.random.default_rng(0).random((side // 8, side // 8, 3)) * 255
        self._opened = Image.fromarray(noise.astype(np.uint8)).resize((side, side))
        self._file = encode_image(self._opened, "image/jpeg", quality=85).data

    def part(self) -> ImagePart:
        part = read_media(self._file + uuid.uuid4().bytes)  # what stands behind its end is not read
        assert isinstance(part, ImagePart)
        return part

    def opened(self) -> Image.Image:
        return self._opened.copy()


class VerlTool(BaseTool):
    """The tool as verl's loop wants it."""

    pictures: Pictures | None = None

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> tuple[ToolResponse, float, dict]:
        assert parameters == {"a": 1, "b": 41}
        if self.pictures is None:
            return ToolResponse(text=RESULT), 0.0, {}
        return ToolResponse(text=RESULT, image=[self.pictures.opened()]), 0.0, {}


class OurTools:
    """The tool as our loop wants it, in the place of the client of a tool server."""

    def __init__(self, pictures: Pictures | None) -> None:
        self._format, self._pictures = HermesFormat(), pictures

    async def call(self, trajectory_id: str, action: str, *, finish: bool = False, **_: Any) -> StepResult:
        if finish:
            return StepResult(trajectory_id)
        (call,) = self._format.find_calls(action)
        assert call.arguments == {"a": 1, "b": 41}
        if self._pictures is None:
            return StepResult(trajectory_id, RESULT)
        return StepResult(trajectory_id, "<image>" + RESULT, image=[self._pictures.part()])


@dataclass(frozen=True)
class Seeing:
    """What loops with images need."""

    pictures: Pictures
    processor: ProcessorMixin
    folder: str
    """Of the model's config."""


@contextlib.contextmanager
def seeing(side: int) -> Iterator[Seeing]:
    """Ray is up within the block: ours puts images into its store."""
    sys.path.append(str(Path(__file__).parents[1] / "examples/train"))
    import ray
    from from_scratch import make_tokenizer as learned
    from from_scratch_vision import CHAT_TEMPLATE, PATCH, VISION, make_processor
    from transformers import Qwen3VLConfig

    tokenizer = learned([THOUGHT, RESULT, QUESTION, json.dumps(SCHEMA)], 600, CHAT_TEMPLATE, VISION)
    ids = dict(zip(("image_token_id", "video_token_id"), tokenizer.convert_tokens_to_ids(VISION[2:]), strict=True))
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            Qwen3VLConfig(**ids).save_pretrained(folder)
            yield Seeing(Pictures(side), make_processor(tokenizer, (8 * 2 * PATCH) ** 2), folder)
    finally:
        ray.shutdown()


def make_loop(
    name: str, engine: Engine, tokenizer: PreTrainedTokenizerBase, sight: Seeing | None = None
) -> Callable[[], AgentLoopBase]:
    """A function that makes an agent loop, as verl does for every trajectory."""
    agent = "actor_rollout_ref.agent"
    overrides = [
        *("data.max_prompt_length=4096", "data.max_response_length=16384", f"{agent}.max_turns=100"),
        *(f"{agent}.enable_mtrl=true", f"{agent}.mtrl_role=tool", f"{agent}.max_concurrent_trajectories=null"),
        *(f"{agent}.tool_server_url=http://127.0.0.1:9", f"{agent}.enable_tqdm=false", f"{agent}.tool_schemas=none"),
        "actor_rollout_ref.rollout.multi_turn.max_tool_response_length=4096",
        *([f"data.continuous_token.enable={str(name == CONTINUOUS).lower()}"] if BY_TURN in LOOPS else []),
        *([f"actor_rollout_ref.model.path={sight.folder}", "actor_rollout_ref.rollout.name=vllm"] if sight else []),
    ]
    with initialize_config_dir(str(Path(main_ppo.__file__).parent / "config"), version_base=None):
        config = compose("agent_ppo_trainer", overrides=overrides)
    with contextlib.redirect_stdout(io.StringIO()):  # verl prints the tool's schema
        tools = ToolListWrap([VerlTool({}, OpenAIFunctionToolSchema.model_validate(SCHEMA))])
    settings: Mapping[str, Any] = {
        "trainer_config": DictConfigWrap(config),
        "server_manager": engine,
        "tokenizer": tokenizer,
        "processor": sight and sight.processor,
        "dataset_cls": RLHFDataset,
        "data_config": DictConfigWrap(config.data),
    }
    if name != OURS:
        VerlTool.pictures = sight and sight.pictures
        return lambda: ToolAgentLoop(**settings, tools=tools)
    worker = VerlToolAgentLoop(**settings)._worker
    tools_of_ours = OurTools(sight and sight.pictures)
    worker.episode = Episode(
        worker.generator, tools_of_ours, worker.tokenizer, worker.options, image_tokens=worker.images
    )
    return lambda: VerlToolAgentLoop(**settings)


async def run(make: Callable[[], AgentLoopBase], trajectories: int, concurrency: int) -> int:
    """Run all of them; tokens of one."""
    places = asyncio.Semaphore(concurrency)

    async def one() -> int:
        async with places:
            messages = [{"role": "user", "content": QUESTION}]
            output = await make().run({"temperature": 1.0}, raw_prompt=messages, tools_kwargs={})
            assert sum(output.response_mask) < len(output.response_mask) == len(output.response_logprobs)
            return len(output.prompt_ids) + len(output.response_ids)

    return (await asyncio.gather(*(one() for _ in range(trajectories))))[0]


async def costs(
    trajectories: int, turns: int, concurrency: int, repeats: int, sight: Seeing | None = None
) -> list[Cost]:
    """Run the loops in turn, `repeats` times each. verl has one way of putting turns with images together."""
    tokenizer = make_tokenizer() if sight is None else sight.processor.tokenizer
    engine = Engine(tokenizer, turns)
    loops = LOOPS if sight is None else (OURS, LOOPS[1])
    makers = {name: make_loop(name, engine, tokenizer, sight) for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    wall: dict[str, list[float]] = {name: [] for name in loops}
    tokens: dict[str, int] = {}
    for make in makers.values():
        await run(make, concurrency, concurrency)
    for _ in range(repeats):
        for name, make in makers.items():
            gc.collect()
            began = time.process_time(), time.perf_counter()
            tokens[name] = await run(make, trajectories, concurrency)
            per_turn = 1000 / (trajectories * (turns + 1))
            cpu[name].append((time.process_time() - began[0]) * per_turn)
            wall[name].append((time.perf_counter() - began[1]) * per_turn)
    return [
        Cost(name, turns, tokens[name], statistics.median(cpu[name]), statistics.median(wall[name])) for name in loops
    ]


async def memory(name: str, live: int, turns: int) -> Memory:
    """Start `live` trajectories and weigh the process when all wait for their last turn."""
    tokenizer = make_tokenizer()
    engine = Engine(tokenizer, turns)
    make = make_loop(name, engine, tokenizer)
    tokens = await run(make, 64, 64)
    gc.collect()
    before = psutil.Process().memory_info().rss
    running = asyncio.ensure_future(run(make, live, live))
    await asyncio.wait_for(engine.hold(live), 500)
    gc.collect()
    after = psutil.Process().memory_info().rss
    engine.let_go()
    await running
    return Memory(name, live, tokens, (after - before) / live / 1024)


def memory_apart(name: str, live: int, turns: int) -> Memory:
    """`memory` in a process of its own."""
    command = [sys.executable, __file__, "--only-memory", name, "--live", str(live), "--turns", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return Memory(**json.loads(done.stdout.splitlines()[-1]))


def cost_table(costs_: list[Cost]) -> Table:
    """A row for each loop and number of turns."""
    table = Table("loop", "tool turns", "tokens", "CPU ms a turn", "wall ms a turn")
    for c in costs_:
        table.add_row(c.loop, str(c.turns), str(c.tokens), f"{c.cpu_ms_per_turn:.3f}", f"{c.wall_ms_per_turn:.3f}")
    return table


def memory_table(weighed: list[Memory]) -> Table:
    """A row for each loop."""
    table = Table("loop", "live", "tokens", "KiB each")
    for m in weighed:
        table.add_row(m.loop, str(m.live), str(m.tokens), f"{m.kib_each:.0f}")
    return table


def main(
    trajectories: Annotated[int, typer.Option(help="A repeat.")] = 256,
    turns: Annotated[list[int] | None, typer.Option(help="Tool turns of a trajectory; may be repeated.")] = None,
    concurrency: Annotated[int, typer.Option()] = 64,
    repeats: Annotated[int, typer.Option()] = 5,
    live: Annotated[int, typer.Option(help="Trajectories whose memory is measured.")] = 10_000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the figures here too.")] = None,
    image_side: Annotated[int | None, typer.Option(min=64, help="Pixels; each result holds an image then.")] = None,
    only_memory: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure, and print two tables."""
    logging.disable(logging.WARNING)
    wanted = turns or [1, 3, 8]
    if only_memory is not None:
        print(json.dumps(asdict(asyncio.run(memory(only_memory, live, wanted[0])))))
        return
    with seeing(image_side) if image_side else contextlib.nullcontext() as sight:
        measured = [cost for n in wanted for cost in asyncio.run(costs(trajectories, n, concurrency, repeats, sight))]
    Console().print(cost_table(measured))
    weighed = [] if image_side else [memory_apart(name, live, 3) for name in LOOPS]
    if weighed:
        Console().print(memory_table(weighed))
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        told = {"cost": [asdict(c) for c in measured], "memory": [asdict(m) for m in weighed]}
        json_path.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
