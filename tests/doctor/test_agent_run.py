"""`doctor --agent`: agent programs in the sandbox, against a scripted model with a real chat template."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from stored_runs import write_rows
from template_models import save_model
from typer.testing import CliRunner, Result

from verl_tool.doctor.doctor_cli import app
from verl_tool.sandbox.isolation.levels import Level, strongest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux" or strongest().level is not Level.full, reason="no sandbox here"),
]
INSTALL = Path(os.environ.get("VERL_TOOL_AGENTS", Path(__file__).parents[2] / ".agents"))
AGENT = '''
"""An agent with one tool. Its first argument says what it does otherwise."""
import json, os, subprocess, sys, urllib.error, urllib.request

how, task = sys.argv[1:]
shell = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "sh", "description": "Run it.", "parameters": shell}}]

def ask(messages, tools=tools):
    body = {"model": "any", "messages": messages, **({"tools": tools} if tools else {})}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())

if how == "silent":
    sys.exit("I ask nobody")
messages = [{"role": "system", "content": "Turn 1."}, {"role": "user", "content": task}]
while True:
    message = ask(messages)
    messages.append(message)
    for call in message.get("tool_calls") or ():
        arguments = json.loads(call["function"]["arguments"])
        output = subprocess.run(arguments["command"], shell=True, capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    if how == "image":
        part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
        messages.append({"role": "user", "content": [part]})
    if how == "late_system":
        messages.append({"role": "system", "content": "Mind the time."})
    if how == "rebuilds":
        messages[0] = {"role": "system", "content": "Turn 2."}
    if how == "titles" and len(messages) < 5:
        ask([{"role": "user", "content": "Name this: " + task}], None)
    if not message.get("tool_calls") and how != "endless":
        break
print(messages[-1]["content"])
if how == "fails":
    sys.exit(7)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    save_model(folder, "qwen3")
    return folder


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent") / "agent.py"
    path.write_text(AGENT)
    for each in (path, *path.parents[:3]):
        each.chmod(0o755)
    return path


def doctor(model: Path, agent: str, *arguments: object) -> tuple[int, str]:
    given = ["--model", model, "--formats", "hermes", "--agent", agent, *arguments]
    result: Result = CliRunner(env={"COLUMNS": "220"}).invoke(app, [str(each) for each in given])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def own(model: Path, program: Path, how: str, *arguments: object) -> tuple[int, str]:
    return doctor(model, f"python {program} {how} '{{task}}'", "--agent_readable", program, *arguments)


def test_an_agent_that_appends_is_one_row(model: Path, program: Path) -> None:
    code, words = own(model, program, "appends")
    assert code == 0, words
    assert "tools 1: sh" in words
    assert "ended exit 0" in words
    assert "1 training row " in words
    assert "2 │ main │ /v1/chat/completions │ 4 (uat)" in words
    assert "calls sh" in words
    assert "0 errors, 0 warnings, 0 notes" in words


@pytest.mark.parametrize(
    ("how", "code", "finding"),
    [
        ("rebuilds", 0, "answer 2 does not go on behind answer 1: message 1 of the system changed: 'Turn 1.' is 'Turn"),
        ("titles", 0, "answer 2 is auxiliary, and is not trained"),
        ("endless", 0, "it asks again after 4 answers without a call, and was ended"),
        ("fails", 0, "it exited with 7; it printed: It prints hello."),
        ("silent", 1, "exited with 1 without a request to the model; it printed: I ask nobody"),
        ("image", 1, "a request was rejected: messages[4].content[0].image_url"),
    ],
)
def test_what_an_agent_does_otherwise_is_found(model: Path, program: Path, how: str, code: int, finding: str) -> None:
    found, words = own(model, program, how)
    assert (found, finding in words) == (code, True), words


def test_what_the_template_refuses_is_named(model: Path, program: Path, tmp_path: Path) -> None:
    template = (model / "chat_template.jinja").read_text()
    strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first or m.role == 'tool' %}"
    path = tmp_path / "strict.jinja"
    path.write_text(strict + "{{ raise_exception('no ' ~ m.role) }}{% endif %}{% endfor %}" + template)
    code, words = own(model, program, "appends", "--chat_template", path)
    assert code == 1, words
    assert (
        "a request was rejected: messages: the chat template rejects what follows an answer: the chat template refuses"
        in words
    )
    assert "warning: the chat template rejects a tool's result: " in words
    assert "system messages in mid-conversation; they are sent as a user's" in words
    assert "call of 'sh' was never answered" in words


def test_a_prompt_that_nearly_fills_the_window_is_a_warning(model: Path, program: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    save_model(small, "qwen3")
    config = {"model_type": "qwen3", "max_position_embeddings": 400}
    (small / "config.json").write_text(json.dumps(config))
    code, words = own(small, program, "appends")
    assert code == 0, words
    assert "of 400 that the model has positions for" in words


def test_it_works_on_a_row_of_the_data(model: Path, program: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [("What is 2 + 2? Write it down.", "4")])
    _, first = own(model, program, "appends")
    code, words = own(model, program, "appends", "--data", tmp_path / "rows.jsonl", "--turn", "Four.")
    assert code == 0, words
    assert "'Four.'" in words
    assert "no tool that the model could call" in words
    assert first != words


@pytest.mark.parametrize(
    ("agent", "arguments", "words"),
    [
        ("pi", ("--agent_install", "nowhere"), "run bash scripts/install_agents.sh nowhere"),
        ("no-such-agent", (), "is not a preset, and no such program is installed; presets: claude_code"),
        ("python 'x", (), "is no command line: No closing quotation"),
    ],
)
def test_an_agent_that_is_not_there_is_named(model: Path, agent: str, arguments: tuple[str, ...], words: str) -> None:
    code, output = doctor(model, agent, *arguments)
    assert (code, words in output) == (2, True), output


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "started"), [("pi", "node_modules/.bin/pi"), ("mini-swe-agent", "mini/bin/mini")])
def test_a_real_agent_only_appends(model: Path, preset: str, started: str) -> None:
    if not (INSTALL / started).exists():
        pytest.skip(f"{preset} is not installed in {INSTALL}; run bash scripts/install_agents.sh")
    code, words = doctor(model, preset, "--agent_install", INSTALL)
    assert code == 0, words
    assert "1 training row " in words
    assert "ended exit 0" in words
    assert "0 errors, 0 warnings" in words
