"""The service as a Ray Serve application: one deployment, each replica with a model of its own.

Each replica listens at the service's port, which the replicas of a node share (`verl_tool.servers.serve.replica`), so
that a token of a stream goes through no second process, and no second queue. Where there are several, each also listens
at a port of its own, by which an agent finds the replica that has its session.
"""

from __future__ import annotations

import asyncio
import gc
import logging

from ray import serve
from ray.serve import Application

from eval_service.engines.base import Engine, EngineError
from eval_service.model.fingerprint import fingerprint
from eval_service.model.images import image_reading
from eval_service.model.tokenizer import ServedTokenizer, load_tokenizer
from eval_service.openai.endpoint import Endpoint
from eval_service.openai.image_reader import ImageReader
from eval_service.service import Service
from eval_service.settings import ServiceSettings, VllmSettings
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.client import ToolClient
from verl_tool.http.host_check import HostCheck
from verl_tool.http.listening_socket import listen_at
from verl_tool.servers.cluster.direct_server import DirectServer
from verl_tool.servers.serve.replica import LEAVING_SECONDS, REPLICA_VARIABLES, SharedPort
from verl_tool.servers.serve.replica_listener import listen_on_the_node_only

APP_NAME = "eval_service"
DEPLOYMENT = "model"
CLOSE_SECONDS = 20.0
"""What Serve grants a replica on top of its drain, to stop the engine."""

logger = logging.getLogger(__name__)


async def make_engine(
    settings: ServiceSettings, tokenizer: ServedTokenizer, images: QwenImages | None = None
) -> Engine:
    """The engine that the settings name, of a model that reads `images`. Raises EngineError or ConfigError."""
    if isinstance(settings.engine, VllmSettings):
        # vLLM is imported where it runs: it takes seconds, and the other engine needs none.
        from eval_service.engines.vllm_engine import VllmEngine

        return VllmEngine(settings.model, settings.engine, trust_remote_code=settings.trust_remote_code, images=images)
    from eval_service.engines.completions_engine import CompletionsEngine

    return await CompletionsEngine.connect(settings.engine, tokenizer.vocab_size)


def make_tool_client(settings: ServiceSettings) -> ToolClient | None:
    """The client of the tool server, if the loop uses tools."""
    options = settings.options
    if not options.enable_agent or options.tool_server_url is None:
        return None
    return ToolClient(options.tool_server_url, api_key=settings.tool_api_key, **options.client_settings())  # type: ignore[arg-type]


class ModelReplica:
    """One replica: an engine, the loop, and the endpoint to them."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ServiceSettings, mark: str, server: str, is_one_of_several: bool
    ) -> None:
        """`mark`: see `fingerprint`. `server`: the name of the service."""
        _log_to_stderr(settings.log_level)
        listen_on_the_node_only()
        tokenizer = load_tokenizer(
            settings.tokenizer or settings.model,
            trust_remote_code=settings.trust_remote_code,
            chat_template_kwargs=settings.chat_template_kwargs,
            chat_template=settings.chat_template,
        )
        self._tools = make_tool_client(settings)
        images, why_no_images = image_reading(settings, tokenizer)
        self._engine = await make_engine(settings, tokenizer, images)
        self._service = Service(
            self._engine,
            tokenizer,
            self._tools,
            settings.options,
            sampling=settings.sampling,
            max_queued=settings.max_queued,
            tool_descriptions=settings.tool_descriptions,
            image_tokens=images,
            image_reader=ImageReader(most=settings.max_images, fetches=settings.allow_image_urls),
            why_no_images=why_no_images,
        )
        # What is loaded stays: to search it for garbage would hold up the event loop for tens of milliseconds.
        gc.freeze()
        own = listen_at(settings.listen_host, 0) if is_one_of_several else None
        self._own_server = None if own is None else DirectServer(own)
        self._endpoint = Endpoint(
            self._service,
            settings.served_model_name,
            fingerprint=mark,
            checkpoint=settings.checkpoint,
            server=server,
            api_key=settings.api_key,
            own_port=None if own is None else own.getsockname()[1],
            request_timeout_seconds=settings.request_timeout_seconds,
            max_body_bytes=settings.max_body_bytes,
            host_check=HostCheck(
                settings.listen_host, settings.listen_port, settings.allowed_hosts, has_key=settings.api_key is not None
            ),
        )
        self._drain_seconds = settings.drain_seconds
        assert settings.listen_port is not None, "a replica shares its service's port"
        self._port = SharedPort(settings.listen_host, settings.listen_port, server)
        if self._own_server is not None:
            await self._own_server.open(self._endpoint)
        await self._port.open(self._endpoint)

    async def check_health(self) -> None:
        """Raises if this replica can no longer serve; Serve then puts another in its place."""
        await self._engine.check()
        if not all(server.is_open() for server in (self._port, self._own_server) if server is not None):
            raise EngineError("the HTTP server of this replica has ended")

    async def describe(self) -> int:
        """The longest context, in tokens."""
        return self._engine.max_model_len

    async def __del__(self) -> None:
        """Serve takes this replica away: answer what was begun, at most for the drain, then close."""
        own = [] if self._own_server is None else [self._own_server]
        await asyncio.gather(self._port.leave(), *(server.stop_accepting() for server in own))
        closing = [server.close(self._drain_seconds) for server in own]
        await asyncio.gather(self._port.close(self._drain_seconds), *closing)
        # Sessions that were not finished until now are lost.
        await self._endpoint.gateway.close()
        await self._service.aclose()
        if self._tools is not None:
            await self._tools.close()
        await asyncio.wait_for(self._engine.close(), CLOSE_SECONDS)


def application(settings: ServiceSettings, num_models: int, *, on_gpus: bool, server: str) -> Application:
    """The Serve application of `num_models` replicas of the service that is called `server`."""
    vllm = settings.engine if isinstance(settings.engine, VllmSettings) else None
    deployment: serve.Deployment = serve.deployment(
        name=DEPLOYMENT,
        num_replicas=num_models,
        ray_actor_options={
            "num_cpus": 1,
            "num_gpus": vllm.tensor_parallel if vllm and on_gpus else 0,
            "runtime_env": {"env_vars": REPLICA_VARIABLES},
        },
        graceful_shutdown_timeout_s=settings.drain_seconds + LEAVING_SECONDS + CLOSE_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        logging_config={"enable_access_log": False, "log_level": settings.log_level},
    )(ModelReplica)
    return deployment.bind(settings, fingerprint(settings), server, num_models > 1)


def _log_to_stderr(level: str) -> None:
    """Our own log goes to the process's standard error, which Ray brings to the terminal of the service."""
    for name in ("eval_service", "verl_tool"):
        local = logging.getLogger(name)
        local.setLevel(level)
        local.propagate = False
        if not local.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            local.addHandler(handler)
