"""How much memory of one GPU each phase of a step takes: arithmetic of what verl's FSDP engine and vLLM allocate.

An estimate, not a measurement. 1 GB is 10^9 bytes. Assumed, from the code that is named or else by us:

- Training state: weights in `fsdp_config.model_dtype` (verl: fp32), gradients and Adam's two moments in the same type,
  16 bytes per trained parameter in all, which is also ZeRO's sum for mixed precision (arXiv 1910.02054, section 3.1).
  FSDP shards it over its group. AdamW's update of all tensors at once takes 4 more bytes (PyTorch: ``foreach``).
- Gradient accumulation: verl 0.9.0 synchronizes gradients at the last micro-batch only, so that each GPU holds those of
  the whole model before it (`FSDPEngine._gradient_sync_context`): in the computing type with FSDP, in fp32 with FSDP2.
- Gathered weights: embeddings and head, and two layers, in the computing type (bf16).
- Activations: with gradient checkpointing each layer's input, and what one layer keeps for its backward pass.
- Masks: without flash-attention, of all pairs of tokens of a packed micro-batch.
- Logits: what `FSDPEngineWithLMHead.prepare_model_outputs` makes of each token and entry of the vocabulary.
- Engine: `gpu_memory_utilization` of the card, in which vLLM holds its weights, working memory and KV cache.
- Overhead: CUDA contexts, NCCL and what PyTorch's allocator cannot use; CUDA graphs are beyond the engine's share.

Left out: vision towers' activations, image tokens that are not in the text, fragmentation, memory of other processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_tool.trainer.preflight.model_shapes import ModelShape

GB = 1e9
CONTEXT_BYTES = 0.6e9
"""Of one process's CUDA context and libraries; a GPU has two, the trainer's and the engine's. By us."""
NCCL_BYTES = 0.5e9
"""Of NCCL's buffers where several GPUs talk. By us."""
GRAPH_BYTES = 1.5e9
"""Of vLLM's CUDA graphs, which stay while the engine sleeps. By us; vLLM logs the true number at its start."""
FUSED_CHUNK = 512
"""Tokens whose logits verl's fused kernels hold at once (`FusedLinearForPPO.chunk_size`)."""
ADAM_MOMENTS = 2


@dataclass(frozen=True)
class TrainedModel:
    """The actor or the critic, as FSDP trains it."""

    shape: ModelShape
    shards: int
    """GPUs that share its state: FSDP's group."""
    fsdp2: bool = False
    weight_bytes: int = 4
    compute_bytes: int = 2
    offload_weights: bool = False
    """To host memory while the model is not used; it is back on the card for each of its phases."""
    offload_optimizer: bool = False
    offload_policy: bool = False
    """FSDP2's: weights, gradients and optimizer stay in host memory, also in the update."""
    reshards: bool = True
    lora_rank: int = 0
    checkpointing: bool = True
    update_tokens: int = 0
    """Of a micro-batch of the update, on this GPU."""
    forward_tokens: int = 0
    """Of a micro-batch of the log-probabilities, or of the values."""
    accumulates: bool = True
    """Whether a mini-batch has several micro-batches, whose gradients are synchronized at the last."""
    has_head: bool = True
    """Whether it has logits: the actor has, a critic has not."""
    entropy_in_update: bool = False
    entropy_in_chunks: bool = True
    """Whether the entropy is computed without a copy of all logits: compiled, or in chunks."""
    scaled_copy: bool = True
    """Whether logits are divided by the temperature into a second tensor: in verl 0.9.1 at another than 1."""
    fused_loss: bool = True
    """Whether flash-attention's cross entropy is there, whose backward pass is in place."""
    fused_kernels: bool = False
    padded: bool = False
    masks: bool = False
    """Whether attention is computed with a mask of pairs of tokens: without flash-attention."""
    row_tokens: int = 0
    """Of prompt and response: with padding a token's mask spans its own row, else the whole micro-batch."""

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return self.shape.lora_parameters(self.lora_rank) if self.lora_rank else self.shape.parameters

    @property
    def weights(self) -> float:
        """Bytes of this GPU's share of the weights, an adapter among them."""
        adapter = self.trained if self.lora_rank else 0
        return self.weight_bytes * (self.shape.parameters + adapter) / self.shards

    @property
    def optimizer(self) -> float:
        """Bytes of this GPU's share of Adam's moments."""
        return ADAM_MOMENTS * self.weight_bytes * self.trained / self.shards

    @property
    def gradients(self) -> float:
        """Bytes of the gradients when they are most: of the share, or of the whole model before a synchronization."""
        if self.offload_policy:
            return 0.0
        shared = self.weight_bytes * self.trained / self.shards
        whole = (4 if self.fsdp2 else self.compute_bytes) * self.trained
        return max(shared, whole) if self.accumulates else shared

    @property
    def gathered(self) -> float:
        """Bytes of the weights that are gathered for computing."""
        of_layers = 2 * self.shape.layer_parameters if self.reshards else self.shape.parameters
        return self.compute_bytes * min(self.shape.root_parameters + of_layers, self.shape.parameters)

    def resident(self, *, optimizer: bool = True) -> float:
        """Bytes that stay on the card while another phase runs."""
        if self.offload_policy:
            return 0.0
        weights = 0.0 if self.offload_weights else self.weights
        return weights + (self.optimizer if optimizer and not self.offload_optimizer else 0.0)

    @property
    def layer_activations(self) -> float:
        """Bytes per token that one layer keeps for its backward pass, with flash-attention: the inputs of two norms in
        fp32 and their results, queries, keys, values and the output of attention, and four tensors of the MLP."""
        shape, c = self.shape, self.compute_bytes
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return 2 * (4 + c) * shape.hidden + c * (2 * queries + 2 * keys) + 4 * c * shape.active_intermediate

    def activations(self) -> float:
        """Bytes of the update's activations."""
        layers, inputs = self.shape.layers, self.compute_bytes * self.shape.hidden
        per_token = layers * inputs + self.layer_activations if self.checkpointing else layers * self.layer_activations
        held = 1 if self.checkpointing else layers
        return self.update_tokens * per_token + self.mask(self.update_tokens, held)

    def mask(self, tokens: int, layers: int = 1) -> float:
        """Bytes of the mask of a micro-batch of `tokens`: true or false, and of so many `layers` what PyTorch's `sdpa`
        makes of it, in the computing type."""
        if not self.masks:
            return 0.0
        width = min(self.row_tokens, tokens) if self.padded else tokens
        return tokens * width * (1 + layers * self.compute_bytes)

    def logit_bytes(self, *, update: bool) -> float:
        """Bytes per token and entry of the vocabulary, in the update or in the forward pass before it."""
        c = self.compute_bytes
        copies = c * (1 + self.scaled_copy + self.padded)
        entropy = self.entropy_in_update if update else True
        if entropy and not self.entropy_in_chunks:
            copies += 8  # softmax in fp32, and its product with the logits
        if not update:
            return copies
        gradients = c if self.scaled_copy else 0
        if entropy:
            gradients += 2 * c  # of both losses, of which none may be in place
        if not self.fused_loss:
            gradients += 4 + c  # the log-softmax in fp32, kept for the backward pass
        return copies + gradients

    def logits(self, *, update: bool) -> float:
        """Bytes of a micro-batch's logits and of what is made of them."""
        if not self.has_head:
            return 0.0
        tokens = self.update_tokens if update else self.forward_tokens
        if self.fused_kernels:
            return min(tokens, FUSED_CHUNK) * self.shape.vocab * 12
        return tokens * self.shape.vocab * self.logit_bytes(update=update)


@dataclass(frozen=True)
class EngineMemory:
    """vLLM on the same card."""

    shape: ModelShape
    tensor_parallel: int = 1
    parts: int = 1
    """Most GPUs that the weights of a replica are spread over."""
    weight_bytes: int = 2
    utilization: float = 0.5
    max_model_len: int = 0
    max_num_seqs: int = 1024
    max_batched_tokens: int = 8192
    eager: bool = False
    sleeps: bool = True
    """Whether it gives its memory back while the model is trained."""

    @property
    def weights(self) -> float:
        """Bytes of this GPU's share."""
        return self.weight_bytes * self.shape.parameters / self.tensor_parallel

    @property
    def working(self) -> float:
        """Bytes beside weights and cache: a batch's widest activations, and the sampler's logits in fp32, twice."""
        widest = 2 * (2 * self.shape.active_intermediate / self.tensor_parallel + 2 * self.shape.hidden)
        return self.max_batched_tokens * widest + 2 * 4 * self.max_num_seqs * self.shape.vocab

    @property
    def graphs(self) -> float:
        """Bytes of CUDA graphs."""
        return 0.0 if self.eager else GRAPH_BYTES

    def cache(self, card: float) -> float:
        """Bytes that are left for the KV cache; negative if there are none."""
        return self.utilization * card - self.weights - self.working

    @property
    def cache_per_token(self) -> float:
        """Bytes of one token on one GPU."""
        return 2 * self.shape.kv_values(self.tensor_parallel)


@dataclass(frozen=True)
class MemoryPhase:
    """What is on the card in one phase of a step, in bytes."""

    name: str
    state: float = 0.0
    gradients: float = 0.0
    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    engine: float = 0.0
    """Weights and working memory of vLLM."""
    cache: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        parts = (self.state, self.gradients, self.gathered, self.activations, self.logits, self.engine, self.cache)
        return sum(parts) + self.overhead


@dataclass(frozen=True)
class Step:
    """The models on one GPU, and the card."""

    actor: TrainedModel
    card: float
    """Bytes."""
    engine: EngineMemory | None
    """None where no engine runs: trajectories are replayed."""
    critic: TrainedModel | None = None
    reference: TrainedModel | None = None
    """Its weights wait in host memory, whatever is set (verl: `CPUOffload` of what is only evaluated)."""
    gpus: int = 1
    sync_bucket: float = 2048 * 2**20

    def phases(self) -> list[MemoryPhase]:
        """A step from end to end."""
        actor, engine, critic = self.actor, self.engine, self.critic
        overhead = 2 * CONTEXT_BYTES + (NCCL_BYTES if self.gpus > 1 else 0.0)
        asleep = MemoryPhase("")
        phases = []
        if engine is not None:
            overhead += engine.graphs
            if not engine.sleeps:
                asleep = MemoryPhase(
                    "", engine=engine.weights + engine.working, cache=max(engine.cache(self.card), 0.0)
                )
            share, held = engine.utilization * self.card, engine.weights + engine.working
            phases.append(
                MemoryPhase("rollout", state=self._resident(), engine=min(held, share), cache=max(share - held, 0.0))
            )
        rest = critic.resident() if critic else 0.0
        phases += [
            self._forward("log-probs", actor, rest, asleep),
            *([self._forward("reference", self.reference, self._resident(), asleep)] if self.reference else []),
            *([self._forward("values", critic, actor.resident(), asleep)] if critic else []),
            *(self._update("critic", critic, actor.resident(), asleep) if critic else []),
            *self._update("actor", actor, rest, asleep),
        ]
        if engine is not None:
            phases.append(self._sync(engine))
        return [replace(phase, overhead=overhead) for phase in phases]

    def _resident(self) -> float:
        return self.actor.resident() + (self.critic.resident() if self.critic else 0.0)

    def _forward(self, name: str, model: TrainedModel, others: float, asleep: MemoryPhase) -> MemoryPhase:
        reference = model is self.reference
        optimizer = 0.0 if model.offload_optimizer or model.offload_policy or reference else model.optimizer
        weights = 0.0 if model.offload_policy or reference else model.weights
        widest = 4 * model.shape.hidden + 3 * model.shape.active_intermediate
        return MemoryPhase(
            name,
            state=others + weights + optimizer,
            gathered=model.gathered,
            activations=model.forward_tokens * model.compute_bytes * widest + model.mask(model.forward_tokens),
            logits=model.logits(update=False),
            engine=asleep.engine,
            cache=asleep.cache,
        )

    def _update(self, name: str, model: TrainedModel, others: float, asleep: MemoryPhase) -> list[MemoryPhase]:
        state = others + (0.0 if model.offload_policy else model.weights + model.optimizer)
        shared = 0.0 if model.offload_policy else model.weight_bytes * model.trained / model.shards
        return [
            MemoryPhase(
                f"{name} update",
                state=state,
                gradients=model.gradients,
                gathered=model.gathered,
                activations=model.activations(),
                logits=model.logits(update=True),
                engine=asleep.engine,
                cache=asleep.cache,
            ),
            # Gradients, and AdamW's temporary of all parameters.
            MemoryPhase(f"{name} optimizer", state, 2 * shared, engine=asleep.engine, cache=asleep.cache),
        ]

    def _sync(self, engine: EngineMemory) -> MemoryPhase:
        actor = self.actor
        on_card = not actor.offload_policy and (not actor.fsdp2 or bool(actor.lora_rank) or not actor.offload_weights)
        weights = actor.weights if on_card else 0.0
        # Of one GPU, FSDP's full state dict is a copy.
        copied = actor.weights if on_card and actor.shards == 1 and not actor.fsdp2 and not actor.lora_rank else 0.0
        optimizer = 0.0 if actor.offload_optimizer or actor.offload_policy else actor.optimizer
        others = self.critic.resident() if self.critic else 0.0
        tensor = actor.weight_bytes * actor.shape.largest_tensor
        return MemoryPhase(
            "weight sync",
            state=weights + copied + optimizer + others,
            gathered=tensor + self.sync_bucket,
            engine=engine.weights,
            cache=0.0 if engine.sleeps else max(engine.cache(self.card), 0.0),
        )

    def host_bytes(self) -> float:
        """Of all nodes together, what waits in host memory: offloaded state, the reference, and the engine's weights
        where an adapter is trained (vLLM's sleep level 1)."""
        total = 0.0
        for model in filter(None, (self.actor, self.critic)):
            copies = self.gpus / model.shards
            if model.offload_weights or model.offload_policy:
                total += model.weights * model.shards * copies
            if model.offload_optimizer or model.offload_policy:
                total += model.optimizer * model.shards * copies
        if self.reference is not None:
            total += self.reference.weights * self.reference.shards
        if self.engine is not None and self.engine.sleeps and self.actor.lora_rank:
            total += self.engine.weights * self.gpus
        return total

    def problems(self) -> list[str]:
        """What cannot fit, whatever the estimate leaves out or gets wrong: by state alone, without a safety margin."""
        found = []
        for name, model in (("actor", self.actor), ("critic", self.critic)):
            if model is None or model.offload_policy:
                continue
            state = model.weights + model.optimizer + model.weight_bytes * model.trained / model.shards
            if state > self.card:
                found.append(
                    f"the {name}'s weights, gradients and optimizer take {state / GB:.0f} GB of each GPU in its "
                    f"update, and a GPU has {self.card / GB:.0f} GB; offloading does not help, since they are back for "
                    "the update: train an adapter (LORA_RANK), use more GPUs, a smaller model, or FSDP2's "
                    "fsdp_config.offload_policy=true"
                )
        engine = self.engine
        if engine is None:
            return found
        share = engine.utilization * self.card
        minimum = engine.weight_bytes * engine.shape.parameters / max(engine.parts, engine.tensor_parallel)
        if minimum > share:
            found.append(
                f"rollout.gpu_memory_utilization={engine.utilization} of {self.card / GB:.0f} GB is "
                f"{share / GB:.1f} GB, and the engine's weights ({minimum / GB:.1f} GB) do not fit; raise it "
                "(GPU_MEMORY) or "
                "rollout.tensor_model_parallel_size (TENSOR_PARALLEL)"
            )
        at_start = self.actor.resident(optimizer=False) + (
            self.critic.resident(optimizer=False) if self.critic else 0.0
        )
        if at_start + share > self.card:
            found.append(
                f"rollout.gpu_memory_utilization={engine.utilization} takes {share / GB:.0f} of {self.card / GB:.0f} "
                f"GB, and the trainer's weights on the card another {at_start / GB:.0f} GB; lower it (GPU_MEMORY), or "
                "offload the weights (OFFLOAD=true)"
            )
        return found
