"""The turns that the model wrote for an agent, as a tree.

A request continues the deepest turn whose conversation it repeats, so an agent that only appends to its history gets
one chain of tokens. Compaction, sub-agents and sampling again make branches. Requests are matched by a hash chain over
canonical messages, as in verifiers (willccbb/verifiers), and by handles: ids that name an answer.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.rendering.template_text import common_prefix
from verl_tool.agent_loop.trajectory import DELEGATED, Author, RowContext, Segment, StopReason, Timings, Trajectory
from verl_tool.content.parts import ImagePart, TextPart
from verl_tool.gateway.conversation import AgentMessage, AgentRequest, ModelAnswer, Role, canonical_arguments, digest_of
from verl_tool.gateway.conversation_renderer import ConversationRenderer, images_of
from verl_tool.gateway.dialects.base import RequestError
from verl_tool.gateway.schema_defaults import drop_defaults, find_defaults
from verl_tool.gateway.session_record import SESSION, describe_answers

FORKED, RESTARTED = "forked", "restarted"
"""Reasons of a row: its prompt begins as another row does; its prompt is a conversation of its own."""
_MIN_REUSED = 24
"""Characters of a line of an answer that a later request must repeat to have used it."""


class SessionPolicy(BaseModel):
    """How requests are matched, and what is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    thoughts: Literal["keep", "sent"] = "keep"
    """What the model is fed of its earlier thoughts: all that it sampled, or what the agent sends back."""
    edited: Literal["adopt", "branch"] = "adopt"
    """An answer that came back changed, but is known by its handle: go on behind the tokens that were sampled, or treat
    it as somebody else's words."""
    dropped: Literal["mask", "train"] = "mask"
    """Answers that the agent threw away and sampled again."""


@dataclass(eq=False)
class ModelTurn:
    """One answer in a session."""

    number: int
    """From 0, in the order in which the answers were made."""
    parent: ModelTurn | None
    context_ids: tuple[int, ...]
    """Between the parent's tokens, or the start, and this answer."""
    context_segments: tuple[Segment, ...]
    """The same, split at images; empty if there are none."""
    generation: Generation
    answer: ModelAnswer
    request_key: bytes
    """Hash of the conversation that it was sampled behind."""
    key: bytes
    """The same with the answer."""
    dialect: str
    agent_id: str
    has_tools: bool
    has_history: bool
    """Its request holds earlier answers."""
    unanswered: tuple[bytes, ...]
    """As of `Placement`."""
    edited: bool
    """An answer before this one came back changed."""
    foreign: int = 0
    """Messages of an assistant between the parent and this one: somebody else's words, or answers that are not known
    again."""
    came_back_edited: bool = False
    """It came back changed itself, and the agent went on behind it."""
    attempts: int = 1
    """Connections that asked for it."""
    seconds: float = 0.0
    """From the request to the answer."""
    delivered: bool = False
    """The agent has received all of it."""
    superseded: bool = False
    """The agent went on from the same request without this answer: it dropped it, or sampled again."""
    reused: bool = False
    """A later request goes on behind it, or repeats its text."""
    end: int = 0
    """Tokens up to and with the answer."""
    children: list[ModelTurn] = field(default_factory=list)

    def path(self) -> list[ModelTurn]:
        """The turns from the start to this one."""
        turns: list[ModelTurn] = []
        turn: ModelTurn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]


@dataclass(frozen=True)
class _Match:
    """What is found of a conversation up to one of its messages."""

    key: bytes
    turn: ModelTurn | None
    """The deepest turn."""
    covered: int
    """Messages up to and with it."""
    edited: bool
    """This message is an answer that came back changed."""


@dataclass(frozen=True)
class _Tools:
    """What matching needs of the tools of a request."""

    tools: tuple[Mapping[str, Any], ...]
    deferred: tuple[Mapping[str, Any], ...]
    texts: tuple[str, ...]
    """Canonical JSON."""
    defaults: Mapping[str, Mapping[str, Any]]
    """As of `find_defaults`."""


@dataclass(frozen=True)
class Placement:
    """Where a request goes on."""

    request: AgentRequest
    parent: ModelTurn | None
    context_ids: tuple[int, ...]
    context_segments: tuple[Segment, ...]
    """The same, split at images; empty if there are none."""
    images: tuple[ImagePart, ...]
    """All that the model is fed, in order."""
    prompt_ids: list[int]
    """All that the model is fed. [prompt_length]"""
    messages: tuple[AgentMessage, ...]
    """The whole conversation."""
    tail: tuple[AgentMessage, ...]
    """Those behind the parent."""
    root: bytes
    defaults: Mapping[str, Mapping[str, Any]]
    """Of the tools' schemas."""
    matches: list[_Match]
    request_key: bytes
    """Hash of the conversation."""
    unanswered: tuple[bytes, ...]
    """Hash of the conversation up to each message that no answer follows, the last one among them."""
    edited: bool
    """One of its answers came back changed."""


_REMEMBERED = 8
"""Conversations, and answers that a request may name, that are kept: the last ones."""
_MAX_SEARCHED = 256 << 10
"""Characters of a request that answers are searched in."""
_MAX_SEARCHES = 16
"""Answers that are searched for, and lines of each."""


_TOKENS: dict[int, int] = {}
"""Each token by itself. As many as vocabularies have."""


class SessionTree:
    """The turns of one session. Not for several threads at once."""

    def __init__(self, renderer: ConversationRenderer, policy: SessionPolicy | None = None) -> None:
        self._renderer, self.policy = renderer, policy or SessionPolicy()
        self.turns: list[ModelTurn] = []
        self._by_key: dict[bytes, list[ModelTurn]] = defaultdict(list)
        self._by_handle: dict[str, ModelTurn] = {}
        self._by_request: dict[bytes, list[ModelTurn]] = defaultdict(list)
        self._stored: dict[str, tuple[AgentMessage, ...]] = {}
        """By the id of an answer, the conversation up to it, where a request may go on from that id."""
        self._matched: dict[bytes, tuple[tuple[AgentMessage, ...], list[_Match]]] = {}
        """By the hash of the tools, the last conversation and what was found up to each message."""
        self._tools: dict[int, _Tools] = {}
        """By the identity of a request's tools, which `RequestReader` keeps."""
        self._images: dict[str, ImagePart] = {}
        """By SHA-256."""
        self._last: tuple[ModelTurn, list[int]] | None = None
        """The last turn, and all tokens up to its end."""

    def place(self, request: AgentRequest) -> Placement:
        """Find where `request` goes on, and what the model is fed. Adds no turn. Raises RequestError if the template
        rejects it, or the answer that it names is not known."""
        messages = self._whole_conversation(request)
        tools = self._tools_of(request)
        root = digest_of(b"", [request.agent_id, *tools.texts])
        matches = self._match(root, messages, tools.defaults)
        parent, covered = matches[-1].turn, matches[-1].covered
        tail = messages[covered:]
        if parent is None:
            context = self._renderer.render_whole(messages, request.tools)
        elif tail:
            context = self._renderer.render_tail(parent.generation.token_ids, parent.answer.message, tail)
        else:
            context = []
        segments = self._renderer.place_images(context, tail)
        if segments:
            context = [token for segment in segments for token in segment.tokens]
        context = _share(context)
        prompt = context if parent is None else self._tokens_up_to(parent) + context
        shown = [image for turn in (parent.path() if parent else ()) for image in self._images_of(turn)]
        following = [*(message.role for message in messages[1:]), None]
        unanswered = tuple(m.key for m, role in zip(matches, following, strict=True) if role is not Role.ASSISTANT)
        return Placement(
            *(request, parent, tuple(context), segments, (*shown, *images_of(tail)), prompt),
            *(messages, tail, root, tools.defaults),
            matches=matches,
            request_key=matches[-1].key,
            unanswered=unanswered,
            edited=any(match.edited for match in matches),
        )

    def _tools_of(self, request: AgentRequest) -> _Tools:
        known = self._tools.get(id(request.tools))
        if known is None or known.tools is not request.tools or known.deferred is not request.deferred_tools:
            texts = tuple(canonical_arguments(json.dumps(tool)) for tool in request.tools)
            defaults = find_defaults((*request.tools, *request.deferred_tools))
            known = _Tools(request.tools, request.deferred_tools, texts, defaults)
            self._tools[id(request.tools)] = known
            _forget_oldest(self._tools)
        return known

    def _tokens_up_to(self, turn: ModelTurn) -> list[int]:
        if self._last is not None and self._last[0] is turn:
            return self._last[1]
        return [token for each in turn.path() for part in _tokens_of(each) for token in part]

    def _images_of(self, turn: ModelTurn) -> list[ImagePart]:
        return [self._images[segment.image] for segment in turn.context_segments if segment.image is not None]

    def add(self, placement: Placement, generation: Generation, answer: ModelAnswer) -> ModelTurn:
        """Keep the answer to a request."""
        request = placement.request
        message = answer.message
        self._images |= {image.sha256: image for image in images_of(placement.tail)}
        turn = ModelTurn(
            number=len(self.turns),
            parent=placement.parent,
            context_ids=placement.context_ids,
            context_segments=placement.context_segments,
            generation=generation,
            answer=answer,
            request_key=placement.request_key,
            key=self._digest(message, placement.request_key, placement.defaults),
            dialect=request.dialect,
            agent_id=request.agent_id,
            has_tools=bool(request.tools),
            has_history=any(each.role is Role.ASSISTANT for each in placement.messages),
            unanswered=placement.unanswered,
            edited=placement.edited,
            foreign=sum(each.role is Role.ASSISTANT for each in placement.tail),
            end=len(placement.prompt_ids) + len(generation.token_ids),
        )
        for match in placement.matches:
            if match.edited and match.turn is not None:
                match.turn.came_back_edited = True
        self._mark_reused(placement.tail)
        self._matched.pop(placement.root, None)
        self._matched[placement.root] = placement.messages, placement.matches
        self.turns.append(turn)
        self._by_key[turn.key].append(turn)
        self._by_request[turn.request_key].append(turn)
        self._by_handle |= dict.fromkeys([answer.id, *(call.id for call in answer.calls)], turn)
        if request.can_be_continued:
            self._stored[answer.id] = (*placement.messages, message)
        _forget_oldest(self._stored)
        _forget_oldest(self._matched)
        if self._last is not None and self._last[0] is turn.parent:
            tokens = self._last[1]
            tokens += placement.context_ids
        else:
            tokens = list(placement.prompt_ids)
        tokens += _share(generation.token_ids)
        self._last = turn, tokens
        if turn.parent is not None:
            turn.parent.children.append(turn)
            turn.parent.reused = True
        return turn

    def deliver(self, turn: ModelTurn) -> None:
        """The agent has received all of `turn`. What it was sampled in place of is superseded."""
        turn.delivered = True
        path = {each.number for each in turn.path()}
        for key in turn.unanswered:
            for other in self._by_request.get(key, ()):
                other.superseded |= other.number < turn.number and other.number not in path

    def _whole_conversation(self, request: AgentRequest) -> tuple[AgentMessage, ...]:
        """The messages that a request stands for: those before it too, if it names the answer that it goes on from."""
        if request.previous is None:
            return request.messages
        before = self._stored.get(request.previous, ())
        if not before:
            raise RequestError(
                f"previous_response_id: {request.previous[:80]!r} is not one of the last {_REMEMBERED} answers of this "
                "session; send the whole conversation"
            )
        places = {call.id: place for message in before for place, call in enumerate(message.calls)}
        behind = (
            replace(each, answers=places.get(each.call_id, each.answers)) if each.role is Role.TOOL else each
            for each in request.messages
        )
        if request.instructions:
            before = before[1:] if before[0].role is Role.SYSTEM else before
            before = (AgentMessage(Role.SYSTEM, (TextPart(request.instructions),)), *before)
        return (*before, *behind)

    def _match(
        self, root: bytes, messages: tuple[AgentMessage, ...], defaults: Mapping[str, Mapping[str, Any]]
    ) -> list[_Match]:
        """What is found up to each message. `root`: the hash before the first one.

        Most requests repeat the one before and append to it; what was found there still holds.
        """
        known, before = self._matched.get(root, ((), []))
        n = common_prefix(known, messages)
        matches = before[:n]
        last = matches[-1] if matches else _Match(root, None, 0, edited=False)
        for number, message in enumerate(messages[n:], n + 1):
            key = self._digest(message, last.key, defaults)
            turn, edited = None, False
            if message.role is Role.ASSISTANT:
                turn = _named(self._by_key.get(key, ()), message)
                if turn is None and self.policy.edited == "adopt":
                    turn = self._by_edited(message, last.key)
                    if turn is not None:
                        key, edited = turn.key, True
            last = _Match(key, turn or last.turn, number if turn else last.covered, edited)
            matches.append(last)
        return matches

    def _by_edited(self, message: AgentMessage, before: bytes) -> ModelTurn | None:
        """The turn that `message` is a changed form of: one that a handle names, or else the only answer to it.
        `before`: hash of the conversation before it, which must be what the turn was sampled behind."""
        same = [turn for turn in self._by_request.get(before, ()) if turn.delivered]
        if self.policy.thoughts == "sent":
            same = [turn for turn in same if turn.answer.thoughts.strip() == message.thoughts.strip()]
        named = [self._by_handle[each] for each in _ids(message) if each in self._by_handle]
        if named:
            return next((turn for turn in reversed(same) if turn in named), None)
        return same[0] if len(same) == 1 else None

    def _digest(self, message: AgentMessage, before: bytes, defaults: Mapping[str, Mapping[str, Any]]) -> bytes:
        return drop_defaults(message, defaults).digest(before, with_thoughts=self.policy.thoughts == "sent")

    def _mark_reused(self, messages: Sequence[AgentMessage]) -> None:
        """Note which answers a request uses elsewhere than behind what they were sampled behind: by their ids, or by
        their text. A summary of the conversation is used so, a title is not."""
        for message in messages:
            for each in _ids(message):
                if (turn := self._by_handle.get(each)) is not None:
                    turn.reused = True
        text = "\n".join(message.text for message in messages)[:_MAX_SEARCHED]
        for turn in [turn for turn in self.turns if not turn.reused][-_MAX_SEARCHES:]:
            lines = [line.strip() for line in turn.answer.text.splitlines()[:_MAX_SEARCHES]]
            turn.reused = any(len(line) >= _MIN_REUSED and line in text for line in lines)

    # Training rows

    def is_trained(self, turn: ModelTurn) -> bool:
        """Whether the turn is in the loss: the agent received it, did not throw it away, and it is not auxiliary, such
        as a title for the session."""
        return self._why_unused(turn) is None

    def _why_unused(self, turn: ModelTurn) -> str | None:
        """Why a turn is in no training row; None if it is in one."""
        if turn.children:
            return None
        if not turn.delivered:
            return "undelivered"
        if not turn.generation.token_ids:
            return "empty"
        if self.policy.dropped == "mask" and turn.superseded and not turn.reused:
            return "dropped"
        return "auxiliary" if self._is_auxiliary(turn) else None

    def _is_auxiliary(self, turn: ModelTurn) -> bool:
        if turn.has_tools or turn.has_history or turn.reused:
            return False
        return any(other.has_tools for other in self.turns)

    def rollout(self, session_id: str, stop: StopReason = StopReason.ANSWERED) -> Trajectory:
        """The session as one rollout: a row for each branch, in which each turn is trained once.

        The deepest branch comes first when turns that branches share are given to rows. Rows stand in the order in
        which their own turns began.
        """
        rows = sorted(self._rows(), key=lambda row: row[1][0].number)
        agents = {"": 0} | {agent: n for n, agent in enumerate(self._sub_agents(), 1)}
        segments: list[Segment] = []
        contexts: list[RowContext] = []
        prompt_segments = 1
        for number, (before, own) in enumerate(rows):
            prompt = [segment for turn in before for segment in self._prompt(turn, with_answer=True)]
            prompt += self._prompt(own[0])
            agent = agents[own[0].agent_id]
            if number:
                reason = FORKED if before else DELEGATED if agent else RESTARTED
                contexts.append(_row_context(prompt, reason))
            else:
                segments += prompt
                prompt_segments = len(prompt)
            segments += self._segments(own, number, agent)
        if not segments:
            segments = self._prompt(self.turns[0]) if self.turns else [Segment(Author.PROMPT, ())]
            prompt_segments = len(segments)
        used = {segment.image for segment in segments} | {image for context in contexts for *_, image in context.images}
        written = [turn for _, own in rows for turn in own]
        numbers = [number for number, segment in enumerate(segments) if segment.author is Author.MODEL]
        places = {turn.number: number for turn, number in zip(written, numbers, strict=True)}
        unused = {turn.number: why for turn in self.turns if (why := self._why_unused(turn)) is not None}
        description = describe_answers(self.turns, unused, places, self._sub_agents())
        seconds = tuple(turn.seconds for turn in written if not turn.agent_id)
        return Trajectory(
            session_id,
            tuple(segments),
            stop,
            prompt_segments,
            images={name: image for name, image in self._images.items() if name in used},
            contexts=tuple(contexts),
            timings=Timings(generate=sum(turn.seconds for turn in self.turns), turns=seconds),
            extra={SESSION: {"policy": self.policy.model_dump(), **description}},
        )

    def _segments(self, turns: Sequence[ModelTurn], row: int, agent: int) -> Iterator[Segment]:
        for number, turn in enumerate(turns):
            if number and turn.context_segments:
                yield from (replace(each, author=Author.TOOL, row=row, agent=agent) for each in turn.context_segments)
            elif number and turn.context_ids:
                yield self._segment(Author.TOOL, turn.context_ids, row=row, agent=agent)
            generation = turn.generation
            log_probs = None if generation.log_probs is None else tuple(generation.log_probs)
            yield self._segment(Author.MODEL, generation.token_ids, log_probs=log_probs, row=row, agent=agent)

    def _prompt(self, turn: ModelTurn, *, with_answer: bool = False) -> list[Segment]:
        """What the model was fed for `turn` behind its parent's answer, as a prompt."""
        segments = [replace(each, author=Author.PROMPT) for each in turn.context_segments]
        segments = segments or [self._segment(Author.PROMPT, turn.context_ids)]
        return [*segments, self._segment(Author.PROMPT, turn.generation.token_ids)] if with_answer else segments

    def _segment(self, author: Author, tokens: Sequence[int], **fields: Any) -> Segment:
        return Segment(author, tuple(tokens), text=self._renderer.decode(tokens), **fields)

    def _sub_agents(self) -> list[str]:
        return list(dict.fromkeys(turn.agent_id for turn in self.turns if turn.agent_id))

    def _rows(self) -> Iterator[tuple[list[ModelTurn], list[ModelTurn]]]:
        """Of each row the turns that are prompt, and those that it trains."""
        assigned: set[int] = set()
        leaves = [turn for turn in self.turns if not any(map(self.is_trained, turn.children))]
        for leaf in sorted(leaves, key=lambda turn: (-turn.end, turn.number)):
            path = leaf.path()
            own = [turn for turn in path if turn.number not in assigned]
            if own and self.is_trained(leaf):
                assigned |= {turn.number for turn in own}
                yield path[: len(path) - len(own)], own


def _share(tokens: Sequence[int]) -> list[int]:
    """The same tokens. Equal ones are one object: a number takes four times the memory of a reference to it."""
    return [_TOKENS.setdefault(token, token) for token in tokens]


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    while len(remembered) > _REMEMBERED:
        del remembered[next(iter(remembered))]


def _row_context(prompt: Sequence[Segment], reason: str) -> RowContext:
    images, start = [], 0
    for segment in prompt:
        if segment.image is not None:
            images.append((start, len(segment.tokens), segment.image))
        start += len(segment.tokens)
    return RowContext(tuple(token for segment in prompt for token in segment.tokens), reason, tuple(images))


def _tokens_of(turn: ModelTurn) -> tuple[Sequence[int], Sequence[int]]:
    return turn.context_ids, turn.generation.token_ids


def _ids(message: AgentMessage) -> set[str]:
    """What in `message` names an answer."""
    return {*message.handles, *(call.id for call in message.calls)}


def _named(turns: Sequence[ModelTurn], message: AgentMessage) -> ModelTurn | None:
    """The turn that the ids in `message` name, or else the last of `turns`."""
    ids = _ids(message)
    named = [turn for turn in turns if turn.answer.id in ids or any(call.id in ids for call in turn.answer.calls)]
    found = named or turns
    return found[-1] if found else None
