"""``python -m verl_tool.doctor``: what a model sees of its tools, what the loop sees of its calls, and what is wrong.

    python -m verl_tool.doctor --model Qwen/Qwen3-0.6B --mtrl_role tool --formats hermes
    python -m verl_tool.doctor --model M --tool_type my_tool.py --data train.parquet --reward_manager gsm8k
    python -m verl_tool.doctor --config outputs/my_recipe/gpu
    python -m verl_tool.doctor --model M --agent pi

Tokenizer and chat template are all that is loaded of the model. Exit code 0: no error; 1: an error; 2: the arguments
cannot be used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from eval_service.episode_flags import set_options, with_episode_flags
from verl_tool.errors import VerlToolError
from verl_tool.util.hub import go_offline_without_hub
from verl_tool.util.json_options import json_object


@with_episode_flags
def examine_model(
    model: Annotated[
        str | None, typer.Option("--model", help="Folder or name on the hub; its weights are not loaded.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Folder of a run, or its config.yaml: all that is not given here is as there."),
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat_template", help="A Jinja file in place of the model's own template.")
    ] = None,
    chat_template_kwargs: Annotated[
        str, typer.Option("--chat_template_kwargs", help='For the template, as JSON: {"enable_thinking": false}')
    ] = "{}",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust_remote_code", help="Run code that the model's folder holds.")
    ] = False,
    tool_type: Annotated[
        str | None, typer.Option("--tool_type", help="Tools to run in this process: names, or paths of .py files.")
    ] = None,
    tool_config: Annotated[
        str | None, typer.Option("--tool_config", help="Their options, as for verl_tool.servers.ray_serve.")
    ] = None,
    data: Annotated[
        list[Path] | None, typer.Option("--data", help="Rows, .parquet, .json or .jsonl; may be repeated.")
    ] = None,
    row: Annotated[int, typer.Option("--row", min=0, help="The row whose prompt is shown.")] = 0,
    turn: Annotated[
        str | None, typer.Option("--turn", help="What the model writes first. Default: an example of the first tool.")
    ] = None,
    reward_manager: Annotated[
        str | None,
        typer.Option("--reward_manager", help="A name, or a .py file: looks at constant answers."),
    ] = None,
    reward_option: Annotated[
        list[str] | None,
        typer.Option("--reward_option", help="An option of it, name=value; may be repeated."),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option("--agent", help="An agent program to run: a preset such as pi, or a command with {task} in it."),
    ] = None,
    agent_install: Annotated[
        str, typer.Option("--agent_install", help="Where scripts/install_agents.sh put the preset's agent.")
    ] = ".agents",
    agent_readable: Annotated[
        list[str] | None,
        typer.Option("--agent_readable", help="A file or folder that the command may read; may be repeated."),
    ] = None,
    agent_seconds: Annotated[float, typer.Option("--agent_seconds", min=1, help="The agent is killed then.")] = 120.0,
    whole: Annotated[bool, typer.Option("--whole", help="Show long prompts in full.")] = False,
    **episode: Any,
) -> None:
    """Show what a model sees of its tools, and check template, formats, tokens, rows and reward."""
    console = Console()
    offline = model is not None and not Path(model).expanduser().is_dir() and go_offline_without_hub()
    try:
        # transformers takes seconds to import; a command line that is wrong shall not wait for it.
        from verl_tool.doctor.examination import Examination

        examination = Examination(
            model=model,
            config=config,
            chat_template=chat_template,
            chat_template_kwargs=json_object(chat_template_kwargs, f"--chat_template_kwargs {chat_template_kwargs!r}"),
            trust_remote_code=trust_remote_code,
            tool_type=tool_type,
            tool_config=tool_config,
            data=tuple(data or ()),
            row=row,
            turn=turn,
            reward_manager=reward_manager,
            reward_options=tuple(reward_option or ()),
            agent=agent,
            agent_install=agent_install,
            agent_readable=tuple(agent_readable or ()),
            agent_seconds=agent_seconds,
            episode=set_options(episode),
        )
        sound = examination.run(console, whole=whole)
    except VerlToolError as error:
        hint = "; the hub cannot be reached: give the folder of a model" if offline else ""
        words = escape(f"{error}{hint}")
        Console(stderr=True).print(f"[bold red]error:[/bold red] {words}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if not sound:
        raise typer.Exit(1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(examine_model)
