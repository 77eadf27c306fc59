"""Parts that need torch, transformers and little else: they run on a machine without an engine and a trainer."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verl_tool.doctor.gpu_smoke.part import Figures, PartContext, PartFailed

TRAJECTORIES = "loop/trajectories.jsonl"
ALLOCATED_BYTES = 1 << 30


def check_device(context: PartContext) -> Figures:
    """A product in each type is near the exact one, and memory that is freed is given back."""
    size = 4096 if context.device == "cuda" else 512
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, size, generator=generator) for _ in range(2))
    exact = a[:64].double() @ b.double()
    figures: Figures = {}
    for name, dtype, limit in (("fp32", torch.float32, 1e-5), ("bf16", torch.bfloat16, 1e-2)):
        left, right = (matrix.to(context.device, dtype) for matrix in (a, b))
        product = left @ right
        error = ((product[:64].cpu().double() - exact).norm() / exact.norm()).item()
        if not error <= limit:
            raise PartFailed(
                f"a product of {size} x {size} matrices in {name} is off by {error:.2g}; at most {limit:g} is expected"
            )
        seconds = _seconds_of(lambda x, y: x @ y, context.device, left, right)
        figures[name] = {"relative_error": error, "tflops": 2 * size**3 / seconds / 1e12}
    if context.device == "cuda":
        figures |= _memory_figures()
    return figures


def check_attention(context: PartContext) -> Figures:
    """All implementations of attention give the same log-probabilities, on rows padded on the left."""
    from verl_tool.doctor.gpu_smoke.tiny_models import Differences, load_text_model, make_text_model

    path = make_text_model(context.folder)
    rows, length = (8, 1024) if context.device == "cuda" else (2, 128)
    ids = torch.randint(3, 300, (rows, length), generator=torch.Generator().manual_seed(0)).to(context.device)
    mask = torch.ones_like(ids)
    mask[rows // 2 :, : length // 3] = 0
    kinds = ["eager", "sdpa"]
    if context.device == "cuda" and find_spec("flash_attn") is not None:
        kinds.append("flash_attention_2")
    figures: Figures = {}
    reference: torch.Tensor | None = None
    for kind in kinds:
        model = load_text_model(path, context.device, attn_implementation=kind)

        @torch.no_grad()
        def forward(model: Any = model) -> torch.Tensor:
            logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
            return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

        found = forward()[mask[:, :-1].bool()]
        figures[kind] = {"seconds": _seconds_of(forward, context.device)}
        if reference is None:
            reference = found
            continue
        differences = Differences()
        differences.add(found, reference.tolist())
        figures[kind] |= differences.check(context.device, f"{kind} beside eager")
    if "flash_attention_2" not in kinds:
        figures["flash_attention_2"] = "not on a CPU" if context.device == "cpu" else "flash-attn is not installed"
    return figures


def check_generator(context: PartContext) -> Figures:
    """The log-probabilities that sampling tells are those of one forward pass over the whole text."""
    from verl_tool.agent_loop.generators.transformers_generator import TransformersGenerator
    from verl_tool.doctor.gpu_smoke import tiny_models

    path = tiny_models.make_text_model(context.folder)
    model, tokenizer = tiny_models.load_text_model(path, context.device), tiny_models.load_tokenizer(path)
    generator = TransformersGenerator(model, tokenizer, SAMPLING)
    prompts = [tokenizer.encode(prompt) for prompt in tiny_models.PROMPTS]
    differences = tiny_models.Differences()

    async def sample() -> list[Any]:
        return await asyncio.gather(
            *(generator.generate(list(p), {"max_tokens": 32}, str(i)) for i, p in enumerate(prompts))
        )

    with tiny_models.peak_of(context.device) as peak, torch.no_grad():
        asyncio.run(sample())  # what is compiled and loaded at the first call
        started = time.monotonic()
        generations = asyncio.run(sample())
        seconds = time.monotonic() - started
        for prompt, generation in zip(prompts, generations, strict=True):
            differences.add(
                tiny_models.token_log_probs(model, prompt, generation.token_ids), generation.log_probs or ()
            )
    figures = differences.check(context.device, "sampling beside a forward pass")
    return {**figures, "tokens_per_second": figures["tokens"] / seconds, **peak}


def check_loop(context: PartContext) -> Figures:
    """Trajectories with several turns and observations hold the tokens that the model saw."""
    from verl_tool.agent_loop.function_tools import FunctionTools
    from verl_tool.agent_loop.trajectory import write_jsonl
    from verl_tool.doctor.gpu_smoke.count_tool import WholeTurnFormat

    def count(text: str) -> str:
        return str(len(text))

    tools = FunctionTools({"count": count}, [WholeTurnFormat()])

    async def run() -> list[Any]:
        return await roll_out(context, await transformers_generator(context), tools)

    trajectories = asyncio.run(run())
    file = context.folder / TRAJECTORIES
    file.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(file, trajectories)
    return check_trajectories(context, trajectories)


def check_server(context: PartContext) -> Figures:
    """The same with a tool server in a process of its own, over HTTP."""
    from verl_tool.client import ToolClient

    async def run(url: str) -> Figures:
        async with ToolClient(url) as tools:
            trajectories = await roll_out(context, await transformers_generator(context), tools)
            return check_trajectories(context, trajectories)

    with running_tool_server(context.folder) as url:
        return asyncio.run(run(url))


def check_update(context: PartContext) -> Figures:
    """The gradient of a policy-gradient loss over the loop's record is the same on the device and on the CPU, and
    nothing of it comes from tokens that the model did not write. With peft, an adapter alone is trained too."""
    from verl_tool.agent_loop.trajectory import read_jsonl
    from verl_tool.doctor.gpu_smoke.tiny_models import load_text_model, make_text_model, token_log_probs

    trajectories = list(read_jsonl(context.folder / TRAJECTORIES))
    path = make_text_model(context.folder)

    def loss_of(model: Any) -> torch.Tensor:
        total = torch.zeros((), device=model.device)
        for i, trajectory in enumerate(trajectories):
            log_probs = token_log_probs(model, trajectory.prompt_ids, trajectory.response_ids)
            mask = torch.tensor(trajectory.loss_mask, device=model.device)
            total = total - (log_probs * mask).sum() * (1.0 if i % 2 else -0.5)
        return total / sum(sum(trajectory.loss_mask) for trajectory in trajectories)

    gradients = []
    for device in ("cpu", context.device):
        model = load_text_model(path, device, torch.float32)
        loss_of(model).backward()
        gradients.append(torch.cat([p.grad.flatten().cpu() for p in model.parameters()]))
    difference = ((gradients[1] - gradients[0]).norm() / gradients[0].norm()).item()
    if not difference <= 1e-3:
        raise PartFailed(f"the gradient differs from the CPU's by {difference:.3g}; at most 0.001 is expected")
    figures: Figures = {"gradient_difference": difference, **_losses_of_steps(model, loss_of)}
    if find_spec("peft") is not None:
        figures["lora"] = _lora_figures(load_text_model(path, context.device, torch.float32), loss_of)
    else:
        figures["lora"] = "peft is not installed"
    return figures


def check_images(context: PartContext) -> Figures:
    """A vision model reads an image in the loop; log-probabilities as by one forward pass."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from verl_tool.agent_loop.episode import Episode
    from verl_tool.agent_loop.generators.qwen_images import QwenImages
    from verl_tool.agent_loop.generators.transformers_generator import TransformersGenerator
    from verl_tool.agent_loop.options import EpisodeOptions
    from verl_tool.content.parts import encode_image
    from verl_tool.doctor.gpu_smoke import tiny_models

    path = tiny_models.make_vision_model(context.folder)
    dtype = tiny_models.dtype_on(context.device)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).to(context.device).eval()
    tokenizer = tiny_models.load_tokenizer(path)
    images = QwenImages(AutoProcessor.from_pretrained(path).image_processor, tokenizer)
    generator = TransformersGenerator(
        model, tokenizer, {**SAMPLING, "suppress_tokens": list(images.banned_ids)}, images=images
    )
    options = EpisodeOptions(enable_agent=False, max_response_length=24)
    episode = Episode(generator, None, tokenizer, options, image_tokens=images)
    prompt = tokenizer.encode(f"{images.placeholder}Say one:\n")
    differences = tiny_models.Differences()

    async def run() -> list[Any]:
        pictures = [encode_image(Image.new("RGB", (64, 64), (80 * i, 40, 90))) for i in range(3)]
        return await asyncio.gather(*(episode.run(prompt, images=[picture]) for picture in pictures))

    with tiny_models.peak_of(context.device) as peak, torch.no_grad():
        for trajectory in asyncio.run(run()):
            if trajectory.fault is not None:
                raise PartFailed(f"a trajectory ended in a fault: {trajectory.fault}")
            texts = (trajectory.prompt_ids, trajectory.response_ids)
            found = tiny_models.log_probs_with_images(model, images, *texts, trajectory.visible_images)
            differences.add(found, trajectory.response_log_probs)
    return {**differences.check(context.device, "images in the loop"), **peak}


def check_losses(context: PartContext) -> Figures:
    """The actor's loss over valid rows: the same on the device and the CPU, and 0 for a mini-batch without a token."""
    values = {device: _actor_losses(device) for device in ("cpu", context.device)}
    (loss, empty), (on_device, empty_on_device) = values["cpu"], values[context.device]
    difference = abs(loss - on_device) / abs(loss)
    if not difference <= 1e-4:
        raise PartFailed(f"the actor's loss is {on_device:.6g} on the device and {loss:.6g} on the CPU")
    if (empty, empty_on_device) != (0.0, 0.0):
        raise PartFailed(f"the loss of a mini-batch without a token is {empty} and {empty_on_device}; it must be 0")
    return {"loss": loss, "relative_difference": difference, "loss_without_tokens": empty_on_device}


@contextmanager
def running_tool_server(folder: Path) -> Iterator[str]:
    """The base URL of a server of `count`, in a process without Ray, for as long as the block runs."""
    from verl_tool.http.supervised_server import SupervisedServer, serve_command
    from verl_tool.servers.serve.ports import free_ports

    port = free_ports(1)[0]
    url, log = f"http://127.0.0.1:{port}", folder / "logs" / "tool_server.log"
    command = serve_command(str(Path(__file__).with_name("count_tool.py")), port, ["--embedded"])
    with SupervisedServer(command, url, log, max_restarts=0):
        yield url


SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


async def transformers_generator(context: PartContext) -> Any:
    from verl_tool.agent_loop.generators.transformers_generator import TransformersGenerator
    from verl_tool.doctor.gpu_smoke import tiny_models

    path = tiny_models.make_text_model(context.folder)
    model = tiny_models.load_text_model(path, context.device)
    torch.manual_seed(0)
    return TransformersGenerator(model, tiny_models.load_tokenizer(path), SAMPLING)


async def roll_out(context: PartContext, generator: Any, tools: Any, **sampling_params: Any) -> list[Any]:
    """A trajectory for each prompt, with up to three calls of `count`."""
    from verl_tool.agent_loop.episode import Episode
    from verl_tool.agent_loop.options import EpisodeOptions
    from verl_tool.doctor.gpu_smoke import tiny_models
    from verl_tool.doctor.gpu_smoke.count_tool import STOPS, WholeTurnFormat

    tokenizer = tiny_models.load_tokenizer(tiny_models.make_text_model(context.folder))
    options = EpisodeOptions(action_stop_tokens=STOPS, max_turns=3, max_response_length=96, max_obs_length=16)
    episode = Episode(generator, tools, tokenizer, options, formats=[WholeTurnFormat()])
    prompts = [tokenizer.encode(prompt) for prompt in tiny_models.PROMPTS]
    return await asyncio.gather(*(episode.run(prompt, sampling_params=sampling_params) for prompt in prompts))


def check_trajectories(context: PartContext, trajectories: Sequence[Any]) -> Figures:
    """No fault, calls that a tool has answered, and log-probabilities as transformers has them. Raises PartFailed."""
    from verl_tool.doctor.gpu_smoke import tiny_models

    faults = [trajectory.fault for trajectory in trajectories if trajectory.fault is not None]
    if faults:
        raise PartFailed(f"{len(faults)} of {len(trajectories)} trajectories ended in a fault, the first: {faults[0]}")
    calls = [call for trajectory in trajectories for call in trajectory.calls]
    answered = [call for call in calls if call.valid and call.observation == f"[count:{len(call.action)}]"]
    if not calls or len(answered) < len(calls):
        raise PartFailed(f"{len(answered)} of {len(calls)} calls were answered with the length of their text")
    model = tiny_models.load_text_model(tiny_models.make_text_model(context.folder), context.device)
    differences = tiny_models.Differences()
    with torch.no_grad():
        for trajectory in trajectories:
            mine = tiny_models.token_log_probs(model, trajectory.prompt_ids, trajectory.response_ids)
            mask = torch.tensor(trajectory.response_mask).bool()
            log_probs = torch.tensor(trajectory.response_log_probs)
            differences.add(mine.cpu()[mask], log_probs[mask].tolist())
    figures = differences.check(context.device, "the loop's record beside a forward pass")
    return {"trajectories": len(trajectories), "calls": len(calls), **figures}


def _seconds_of(work: Callable[..., Any], device: str, *arguments: Any, repeats: int = 5) -> float:
    """Mean of some repeats, behind one that is not counted."""

    def run() -> None:
        work(*arguments)
        if device == "cuda":
            torch.cuda.synchronize()

    run()
    started = time.monotonic()
    for _ in range(repeats):
        run()
    return (time.monotonic() - started) / repeats


def _memory_figures() -> Figures:
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    block = torch.empty(ALLOCATED_BYTES, dtype=torch.uint8, device="cuda")
    within = torch.cuda.mem_get_info()[0]
    del block
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info()[0]
    if before - within < ALLOCATED_BYTES or after < before - (64 << 20):
        in_use, returned = (before - within) / 2**30, (after - within) / 2**30
        raise PartFailed(f"of 1 GiB, {in_use:.2f} were taken and {returned:.2f} given back")
    capability = ".".join(map(str, torch.cuda.get_device_capability()))
    return {"free_gib": before / 2**30, "total_gib": total / 2**30, "capability": capability}


def _losses_of_steps(model: Any, loss_of: Callable[[Any], torch.Tensor], steps: int = 2) -> Figures:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    losses.append(loss_of(model).item())
    if not losses[-1] < losses[0]:
        raise PartFailed(f"{steps} steps took the loss from {losses[0]:.4g} to {losses[-1]:.4g}; it must fall")
    return {"loss_before": losses[0], "loss_after": losses[-1]}


def _lora_figures(model: Any, loss_of: Callable[[Any], torch.Tensor]) -> Figures:
    from peft import LoraConfig, get_peft_model

    frozen = {name: copy.deepcopy(p.detach()) for name, p in model.named_parameters()}
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    figures = _losses_of_steps(adapted, loss_of)
    weights = {
        name.replace(".base_layer", ""): p
        for name, p in adapted.base_model.model.named_parameters()
        if "lora_" not in name
    }
    changed = [name for name, value in frozen.items() if not torch.equal(weights[name], value)]
    if changed:
        raise PartFailed(f"training an adapter changed {len(changed)} of the model's own weights, such as {changed[0]}")
    return figures


def _actor_losses(device: str) -> tuple[float, float]:
    """Of a batch with one invalid row, and of one without a valid token."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_tool.agent_workers.masked_loss import EmptyBatchSafeLoss

    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode="seq-mean-token-mean",
        policy_loss=PolicyLossConfig(loss_mode="vanilla"),
    )
    loss_fn = EmptyBatchSafeLoss(lambda **given: ppo_loss(config, **given))
    rows, length = 4, 6
    generator = torch.Generator().manual_seed(0)
    old, advantages = (torch.randn(rows, length, generator=generator) for _ in range(2))
    losses = []
    for valid in (3, 0):
        mask = torch.ones(rows, length, dtype=torch.int64)
        mask[valid:] = 0
        ids = [torch.ones(1 + length, dtype=torch.int64, device=device) for _ in range(rows)]
        columns = {
            "response_mask": mask,
            "loss_mask": mask,
            "old_log_probs": -old.abs(),
            "advantages": advantages,
            "prompts": torch.ones(rows, 1),
            "responses": torch.ones(rows, length),
            "attention_mask": torch.ones(rows, 1 + length, dtype=torch.int64),
        }
        data = TensorDict({name: value.to(device) for name, value in columns.items()}, batch_size=rows)
        data["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
        tu.assign_non_tensor(data, batch_num_tokens=int(mask.sum()), dp_size=1, global_batch_size=max(valid, 1))
        new = [torch.cat([row, row.new_zeros(1)]) for row in (-old.abs() * 0.9).to(device)]
        output = torch.nested.as_nested_tensor(new, layout=torch.jagged)
        loss, _ = loss_fn(model_output={"log_probs": output}, data=data)
        losses.append(float(loss))
    return losses[0], losses[1]
