"""What a service is told at its start, in the form in which it travels to every replica."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.content.parts import LIMITS
from verl_tool.http.request_body import MAX_MEDIA_BODY_BYTES
from verl_tool.protocol import ToolDescription


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Sampling(_Settings):
    """How the model draws where a request does not say. OpenAI's defaults, unless a run's validation says otherwise."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    ignore_eos: bool = False


class VllmSettings(_Settings):
    """A vLLM engine within each replica."""

    kind: Literal["vllm"] = "vllm"
    tensor_parallel: PositiveInt = 1
    dtype: str = "auto"
    max_model_len: PositiveInt | None = None
    """None: what the model's config says."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_num_seqs: PositiveInt | None = None
    enforce_eager: bool = False
    seed: int = 0
    engine_kwargs: dict[str, Any] = {}
    """Further arguments of the engine, by vLLM's names; they win over the fields above."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs"
    """``processed``: under the distribution that tokens are drawn from, as in training."""


class CompletionsSettings(_Settings):
    """A server that speaks OpenAI's ``/v1/completions`` and gives token ids, such as ``vllm serve``."""

    kind: Literal["completions"] = "completions"
    url: str
    """Its base URL, with or without ``/v1``."""
    model: str | None = None
    """The model's name there; None: the only one that it serves."""
    api_key: str | None = Field(default=None, repr=False)
    max_connections: PositiveInt = 1024
    max_model_len: PositiveInt | None = None
    """None: what the server tells."""


class ServiceSettings(_Settings):
    model: str
    """Folder or hub name of the model; its tokenizer is read from `tokenizer`, or from here."""
    served_model_name: str
    checkpoint: str | None = None
    """Which weights of a run these are, in words."""
    tokenizer: str | None = None
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    """Go to every rendering of the chat template, such as ``enable_thinking``."""
    chat_template: str | None = None
    """Jinja text in place of the tokenizer's own."""
    engine: Annotated[VllmSettings | CompletionsSettings, Field(discriminator="kind")] = VllmSettings()
    options: EpisodeOptions
    """The loop. `max_concurrent_trajectories`: answers that one replica works on at a time."""
    tool_descriptions: tuple[ToolDescription, ...] | None = None
    """What prompts tell of the tools, as the run that is served kept it; None: what the tool server says of them."""
    sampling: Sampling = Sampling()
    tool_api_key: str | None = Field(default=None, repr=False)
    api_key: str | None = Field(default=None, repr=False)
    max_queued: PositiveInt = 8192
    """Answers that wait in one replica before it refuses with 503."""
    request_timeout_seconds: PositiveFloat = 3600.0
    """A request that takes longer is stopped, and answered with 504."""
    drain_seconds: PositiveFloat = 60.0
    """The longest that a stopping replica waits for the answers that it works on."""
    max_body_bytes: PositiveInt = MAX_MEDIA_BODY_BYTES
    max_images: PositiveInt = LIMITS.media
    """Of one request."""
    allow_image_urls: bool = False
    """Fetch images from ``http`` addresses, public ones only; else requests must hold them."""
    listen_host: str = "127.0.0.1"
    listen_port: PositiveInt | None = None
    """None: a request's ``Host`` may bear any port."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients may call (`verl_tool.http.host_check`)."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
