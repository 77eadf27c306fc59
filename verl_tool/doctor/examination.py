"""One run of the doctor, from its arguments to the report."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console

from eval_service.episode_flags import merged_options
from eval_service.model.tokenizer import load_tokenizer
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.row import REWARD_COLUMNS
from verl_tool.agent_workers.reward_manager.grading.cli_inputs import parse_options
from verl_tool.agent_workers.reward_manager.grading.manager_process import GradedCase, graded_in_child
from verl_tool.checks import RELIED_ON, examine, examine_agents_model, examine_rows
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.reward import constant_answers, constant_cases, gold_cases, grading_failed
from verl_tool.checks.row_files import RowFile, check_rows
from verl_tool.checks.setup import Row, Setup
from verl_tool.doctor.agent_display import print_agent_report
from verl_tool.doctor.agent_findings import findings_of
from verl_tool.doctor.agent_run import program_of, run_agent
from verl_tool.doctor.demonstration import Demonstration, StandIn, demonstrate
from verl_tool.doctor.display import print_report
from verl_tool.doctor.inputs import OfConfig, ToolSource, api_key, context_length, read_config, rows_in
from verl_tool.errors import ConfigError
from verl_tool.gateway.agent_host import AgentTask
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.session import SessionOptions

AGENT_SECONDS = 120.0
"""For an agent, which is killed then."""
GRADING_SECONDS = 30.0
"""Time limit to grade one answer."""
_MODES = {"enable_mtrl", "action_stop_tokens", "enable_agent"}
"""Options that select the loop, which is chat mode without any of them."""


@dataclass(frozen=True)
class Examination:
    """The arguments of the command."""

    model: str | None = None
    config: Path | None = None
    chat_template: Path | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    trust_remote_code: bool = False
    tool_type: str | None = None
    tool_config: str | None = None
    data: tuple[Path, ...] = ()
    row: int = 0
    turn: str | None = None
    reward_manager: str | None = None
    reward_options: tuple[str, ...] = ()
    agent: str | None = None
    agent_install: str = ".agents"
    agent_readable: tuple[str, ...] = ()
    agent_seconds: float = AGENT_SECONDS
    episode: Mapping[str, Any] = field(default_factory=dict)

    def run(self, console: Console, *, whole: bool = False) -> bool:
        """Run the checks and print the report. Return whether there is no error.

        Raises VerlToolError for unusable arguments.
        """
        setup, demonstration = self._setup(), None
        _ = setup.prompts  # an unknown format or tool is an error of the command line and not a finding
        of_rows = examine_rows(setup.rows, REWARD_COLUMNS if self._manager is not None else ())
        findings = [*self._of_files(), *of_rows, *self._of_reward(setup.rows)]
        row = setup.rows[self.row] if setup.rows else None
        program = self._program
        if program is not None:
            return self._run_agent(console, setup, program, row, findings)
        findings += examine(setup)
        unsound = any(each.severity is Severity.ERROR and each.check in RELIED_ON for each in findings)
        if not unsound and setup.problem_of_prompt(row) is None:
            demonstration = asyncio.run(self._demonstration(setup, row))
        print_report(console, setup, demonstration, findings, whole=whole)
        return not any(each.severity is Severity.ERROR for each in findings)

    @cached_property
    def _of_config(self) -> OfConfig | None:
        return read_config(self.config) if self.config is not None else None

    @cached_property
    def options(self) -> EpisodeOptions:
        """The options of the config, overridden by the flags. Raises ConfigError."""
        flags, written = dict(self.episode), self._of_config
        if written is None and not _MODES & set(flags):
            flags["enable_mtrl"] = True
        return merged_options(None if written is None else written.options, flags)

    @cached_property
    def _program(self) -> AgentProgram | None:
        """The agent to run. Raises ConfigError if it is not installed."""
        if self.agent is not None:
            return program_of(self.agent, self.agent_install, self.agent_readable, self.agent_seconds)
        written = None if self._of_config is None else self._of_config.gateway
        if written is None:
            return None
        return written.program.model_copy(update={"seconds": min(written.program.seconds, self.agent_seconds)})

    def _run_agent(
        self, console: Console, setup: Setup, program: AgentProgram, row: Row | None, findings: list[Finding]
    ) -> bool:
        findings += examine_agents_model(setup)
        written = None if self._of_config is None else self._of_config.gateway
        run = None
        if not any(each.severity is Severity.ERROR for each in findings):
            options = SessionOptions() if written is None else written.session
            task = None
            if row is not None:
                task = AgentTask.of_row(row.messages, row.sent, None, row.where, judges=program.judges)
            run = asyncio.run(run_agent(setup, program, options, task, self.turn))
            findings += findings_of(setup, run)
        print_agent_report(console, setup, run, findings)
        return not any(each.severity is Severity.ERROR for each in findings)

    @cached_property
    def _tools(self) -> ToolSource:
        written, own_url = self._of_config, self.episode.get("tool_server_url")
        if self.tool_type is not None and own_url is not None:
            raise ConfigError("--tool_type makes tools here and --tool_server_url names a server; give just one")
        if self.tool_config is not None and self.tool_type is None:
            raise ConfigError("--tool_config has options for the tools of --tool_type; give that too")
        if self.tool_type is not None or own_url is not None or written is None:
            return ToolSource(self.tool_type, self.tool_config, self.options, api_key=api_key())
        # A server that a run started has ended with the run.
        return ToolSource(written.tool_type, None, self.options, written.tool_descriptions, api_key())

    @cached_property
    def _files(self) -> tuple[RowFile, ...]:
        return tuple(map(RowFile, self.data)) or (self._of_config.data if self._of_config is not None else ())

    @property
    def _prompt_key(self) -> str:
        return self._of_config.prompt_key if self._of_config is not None else "prompt"

    def _setup(self) -> Setup:
        written = self._of_config
        model = self.model or (written.model if written is not None else None)
        if model is None:
            raise ConfigError("no model: give --model (a folder or a name on the hub), or --config of a run")
        trust = self.trust_remote_code or (written is not None and written.trust_remote_code)
        rows = rows_in(self._files, self._prompt_key)
        if rows and self.row >= len(rows):
            raise ConfigError(f"--row {self.row}: {len(rows)} rows are read, from 0 on")
        options, tools = self.options, self._tools.described()
        tokenizer = load_tokenizer(
            model,
            trust_remote_code=trust,
            chat_template_kwargs=self.chat_template_kwargs or (written.chat_template_kwargs if written else {}),
            chat_template=self._template(),
        )
        return Setup(
            tokenizer,
            options,
            tools,
            rows,
            drops_overlong=written.drops_overlong if written is not None else False,
            context_length=context_length(model, trust),
        )

    def _template(self) -> str | None:
        if self.chat_template is None:
            return self._of_config.chat_template if self._of_config is not None else None
        try:
            return self.chat_template.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--chat_template {self.chat_template} cannot be read: {error}") from error

    @property
    def _manager(self) -> str | None:
        return self.reward_manager or (self._of_config.reward_manager if self._of_config is not None else None)

    def _of_files(self) -> Iterator[Finding]:
        """Check all rows of the files, as a training does."""
        for file in self._files:
            try:
                check_rows(file, self._prompt_key)
            except ConfigError as error:
                yield Finding("columns_are_there", Severity.ERROR, str(error), "")

    def _of_reward(self, rows: tuple[Row, ...]) -> list[Finding]:
        """Check the reward manager. Raises UnusableError if it cannot be made."""
        cases = constant_cases(rows)
        if self._manager is None or not cases:
            return []
        written = self._of_config
        own = {} if written is None or self.reward_manager is not None else dict(written.reward_options)
        options = own | parse_options(self.reward_options)
        cases += gold_cases(rows)
        graded: list[GradedCase] = []
        for each in graded_in_child(self._manager, options, cases, GRADING_SECONDS):
            graded.append(each)
            if grading_failed(graded):
                break
        if self._program is not None and any(each.failure for each in graded):
            return []  # it may read what the program leaves in the record
        return list(constant_answers(cases, graded))

    async def _demonstration(self, setup: Setup, row: Row | None) -> Demonstration:
        async with self._tools.running() as tools:
            return await demonstrate(setup, tools or StandIn(setup), row, self.turn)
