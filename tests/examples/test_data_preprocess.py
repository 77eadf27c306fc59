"""The data scripts, run as a user runs them, on their hand-made rows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from verl_tool.agent_loop.prompt.conversation import read_conversation
from verl_tool.agent_loop.row import build_call_extra
from verl_tool.content.packed_files import unpack
from verl_tool.protocol import FILES_FIELD
from verl_tool.sandbox.backends.image_builder import ImageBuilder
from verl_tool.tasks.task import Task
from verl_tool.tasks.task_images import TaskImage
from verl_tool.verification import verification_of

pytest.importorskip("datasets")

pytestmark = pytest.mark.slow
pd = pytest.importorskip("pandas")

SCRIPTS = Path(__file__).parents[2] / "examples" / "data_preprocess"
COLUMNS = {"data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name", "use_tool"}
NAMES = (
    "acecoder",
    "deepmath",
    "function_calling",
    "gsm8k",
    "aime",
    "search_r1",
    "pixel_reasoner",
    "reasoning",
    "skysql",
    "terminal_tasks",
)


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the scripts on the path, as when one of them is run, and no hub."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield
    for name in (*NAMES, "rows", "math_prompts"):
        sys.modules.pop(name, None)


def run(name: str, folder: Path, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(__import__(name).main)
    return CliRunner().invoke(app, [*arguments, "--local_dir", str(folder)])


def made(name: str, folder: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    """Rows by split."""
    result = run(name, folder, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "rows ->" in result.output
    assert "one example:" in result.output
    return {path.stem: pd.read_parquet(path).to_dict("records") for path in sorted(folder.glob("*.parquet"))}


def from_samples(name: str, folder: Path, *arguments: str) -> dict[str, list[dict[str, Any]]]:
    return made(name, folder, "--dataset_path", str(SCRIPTS / "samples" / f"{name}.jsonl"), *arguments)


@pytest.mark.parametrize("name", ["acecoder", "deepmath", "gsm8k", "search_r1"])
def test_samples_become_rows_of_verls(name: str, tmp_path: Path) -> None:
    splits = from_samples(name, tmp_path, "--test_size", "1")
    with (SCRIPTS / "samples" / f"{name}.jsonl").open() as file:
        given = sum(1 for _ in file)
    assert (len(splits["train"]), len(splits["test"])) == (given - 1, 1)
    for split, rows in splits.items():
        for i, row in enumerate(rows):
            assert set(row) == COLUMNS
            assert (row["extra_info"]["split"], row["extra_info"]["index"]) == (split, i)
            assert row["agent_name"] == "verltool_agent"
            assert row["reward_model"]["style"] == "rule"
            assert row["reward_model"]["ground_truth"]
            assert row["prompt"][-1]["role"] == "user"


def test_the_loop_is_the_one_that_is_registered() -> None:
    rows = __import__("rows")
    named = (SCRIPTS.parents[1] / "verl_tool" / "trainer" / "config" / "agent_loops.yaml").read_text()
    assert f"name: {rows.AGENT_NAME}" in named


def test_acecoder(tmp_path: Path) -> None:
    plain = from_samples("acecoder", tmp_path / "plain", "--test_size", "1")
    prompted = from_samples("acecoder", tmp_path / "prompted", "--test_size", "1", "--add_execution_prompt")
    assert [row["use_tool"] for row in plain["train"]] == [False] * 5
    assert [row["use_tool"] for row in prompted["train"]] == [True] * 5
    assert "```output" in prompted["train"][0]["prompt"][0]["content"]
    assert "```output" not in plain["train"][0]["prompt"][0]["content"]
    rows = {row["extra_info"]["id"]: row for part in plain.values() for row in part}
    tests = json.loads(rows["made_3"]["reward_model"]["ground_truth"])["tests"]
    assert len(tests) == 3
    programs = json.loads(rows["made_5"]["reward_model"]["ground_truth"])["programs"]
    assert programs[0] == ["3\n1 2 3\n", "6\n3\n"]
    for row in rows.values():
        shown = json.dumps([list(row["prompt"]), {k: str(v) for k, v in row["extra_info"].items()}])
        assert not any(test in shown for test in json.loads(row["reward_model"]["ground_truth"]).get("tests", ()))


def test_acecoder_s_test_problems_once_more_without_the_tool(tmp_path: Path) -> None:
    splits = from_samples(
        "acecoder", tmp_path, "--test_size", "2", "--add_execution_prompt", "--without_tool", "--no_system_prompt"
    )
    assert set(splits) == {"train", "test", "without_tool"}
    with_tool, without = splits["test"], splits["without_tool"]
    assert [row["reward_model"] for row in with_tool] == [row["reward_model"] for row in without]
    assert {row["data_source"] for row in splits["train"] + with_tool} == {"acecoder"}
    assert {row["data_source"] for row in without} == {"acecoder_without_tool"}
    assert [row["use_tool"] for row in with_tool + without] == [True, True, False, False]
    for row in (row for part in splits.values() for row in part):
        assert [dict(message) for message in row["prompt"]] == [
            {"role": "user", "content": row["extra_info"]["question"]}
        ]


def test_answers(tmp_path: Path) -> None:
    gsm8k = from_samples("gsm8k", tmp_path / "gsm8k", "--test_size", "1")
    answers = {row["reward_model"]["ground_truth"] for part in gsm8k.values() for row in part}
    assert answers == {"114", "240", "90000", "-8", "300"}
    aime = from_samples("aime", tmp_path / "aime")
    assert list(aime) == ["test"]
    assert [row["reward_model"]["ground_truth"] for row in aime["test"]] == ["48", "1", "84"]
    search = from_samples("search_r1", tmp_path / "search", "--test_size", "0")
    assert json.loads(search["train"][1]["reward_model"]["ground_truth"])[0] == "Danube"
    assert search["train"][0]["prompt"][0]["content"].endswith("gold?")
    assert "<search>" in search["train"][0]["prompt"][0]["content"]
    bare = from_samples("search_r1", tmp_path / "bare", "--test_size", "1", "--no-tool", "--without_tool")
    assert [row["data_source"] for row in bare["without_tool"]] == ["without_tool"]
    for row in (row for part in bare.values() for row in part):
        assert not row["use_tool"]
        assert "<answer>" in row["prompt"][0]["content"]
        assert "search" not in row["prompt"][0]["content"]


def test_function_calling(tmp_path: Path) -> None:
    sizes = ("--train_size", "40", "--test_size", "8")
    splits = made("function_calling", tmp_path, *sizes)
    assert [len(splits[name]) for name in ("train", "test")] == [40, 8]
    for row in splits["train"]:
        assert set(row) == COLUMNS
        assert row["use_tool"]
        assert "Call a function" in row["prompt"][0]["content"]
        assert row["prompt"][-1]["content"] == row["extra_info"]["question"]
        assert "tools_kwargs" not in row["extra_info"]
    bare = made("function_calling", tmp_path / "bare", *sizes, "--no-tool")["train"]
    assert not any(row["use_tool"] or "Call" in row["prompt"][0]["content"] for row in bare)


def test_terminal_tasks(tmp_path: Path) -> None:
    tasks = SCRIPTS.parent / "tasks"
    splits = made("terminal_tasks", tmp_path, "--tasks", str(tasks), "--test_size", "2", "--skip_unsupported")
    folders = [path for path in tasks.iterdir() if not path.name.startswith("image-")]
    assert [len(splits[name]) for name in ("train", "test")] == [len(folders) - 2, 2]
    for row in (row for part in splits.values() for row in part):
        assert set(row) == COLUMNS
        folder = tasks / row["extra_info"]["task"]
        assert row["prompt"][1]["content"] == (folder / "instruction.md").read_text().strip()
        sent = build_call_extra(row["extra_info"]["tools_kwargs"], None, "row")
        laid_out = folder / "environment" / "files"
        assert set(unpack(sent[FILES_FIELD])) == {
            path.relative_to(laid_out).as_posix() for path in laid_out.rglob("*") if path.is_file()
        }
        verification = verification_of(row["reward_model"], "row")
        assert verification is not None
        assert {"test.sh"} <= set(unpack(verification.files)) == {path.name for path in (folder / "tests").iterdir()}
        assert set(sent) == {FILES_FIELD}, "no test is sent with the calls"


def test_a_task_brings_its_image_to_agent_programs(tmp_path: Path) -> None:
    task = shutil.copytree(SCRIPTS.parent / "tasks" / "find-value", tmp_path / "tasks" / "one")
    config = (task / "task.toml").read_text().replace("[environment]", '[environment]\ndocker_image = "my/task:1"')
    (task / "task.toml").write_text(config)
    for flags, images in (((), None), (("--images",), "my/task:1")):
        folder = tmp_path / f"rows{len(flags)}"
        [row] = made("terminal_tasks", folder, "--tasks", str(task.parent), *flags)["train"]
        assert build_call_extra(row["extra_info"]["tools_kwargs"], None, "row").get("workspace_image") == images


def test_a_task_that_needs_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def prepare_image(task: Task, builder: ImageBuilder, _: object) -> TaskImage:
        return TaskImage(f"built:{task.name}-{builder.network}", "ada")

    (tmp_path / "docker").touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("verl_tool.tasks.task_images.prepare_image", prepare_image)
    for name in ("image-environment", "find-value"):
        shutil.copytree(SCRIPTS.parent / "tasks" / name, tmp_path / "tasks" / name)
    config = tmp_path / "tasks" / "image-environment" / "task.toml"
    config.write_text(config.read_text().replace("cpus = 1\nmemory_mb = 1024", 'cpus = 2\nmemory = "4G"'))
    options = ("--tasks", str(tmp_path / "tasks"))
    failed = run("terminal_tasks", tmp_path / "rows", *options)
    assert "image-environment: environment/Dockerfile, line 3: ENV needs an image" in str(failed.exception)
    rows = made("terminal_tasks", tmp_path / "one", *options, "--backend", "docker", "--build_network", "host")["train"]
    sent = {row["extra_info"]["task"]: build_call_extra(row["extra_info"]["tools_kwargs"], None, "row") for row in rows}
    # A column has the keys of all rows.
    assert (bool(sent["find-value"][FILES_FIELD]), sent["find-value"]["workspace_image"]) == (True, None)
    limits = {"cpus": 2.0, "memory_mb": 4096, "allowed_hosts": []}
    assert sent["image-environment"] == {
        "workspace_image": "built:image-environment-host",
        "workspace_limits": limits,
    }
    rows = made("terminal_tasks", tmp_path / "all", *options, "--backend", "docker", "--images")["train"]
    images = [row["extra_info"]["tools_kwargs"]["workspace_image"] for row in rows]
    assert sorted(images) == ["built:find-value-none", "built:image-environment-none"]


def test_aime_trains_on_other_years_than_the_test_s(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.jsonl"
    years = [{"ID": f"{year}-1", "Year": year, "Question": f"q{year}", "Answer": "080"} for year in (1983, 2023, 2024)]
    earlier.write_text("".join(f"{json.dumps(row)}\n" for row in years))
    aime = from_samples("aime", tmp_path / "aime", "--train_path", str(earlier))
    assert [row["extra_info"]["question"] for row in aime["train"]] == ["q1983", "q2023"]
    assert {row["reward_model"]["ground_truth"] for row in aime["train"]} == {"80"}
    assert {row["data_source"] for row in aime["test"]} == {"aime_2024"}


def test_aime_leaves_out_and_names_what_has_no_number_for_an_answer(tmp_path: Path) -> None:
    answers = ("080", -3, "12 or 15", 7)
    rows = [{"ID": f"1983-{i}", "Problem": f"q{i}", "Answer": str(answer)} for i, answer in enumerate(answers)]
    source = tmp_path / "source.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = run("aime", tmp_path / "out", "--dataset_path", str(source))
    assert result.exit_code == 0, result.exception
    told = " ".join(result.output.split())
    assert "left out 2 of 4 rows for test" in told
    assert "1983-1 ('-3'), 1983-2 ('12 or 15')" in told
    made_rows = pd.read_parquet(tmp_path / "out" / "test.parquet").to_dict("records")
    assert [row["reward_model"]["ground_truth"] for row in made_rows] == ["80", "7"]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows[1:3]))
    result = run("aime", tmp_path / "none", "--dataset_path", str(source))
    assert "2 of 2 rows for test: field 'Answer' must be" in str(result.exception)


def test_deepmath_leaves_easy_problems_out(tmp_path: Path) -> None:
    splits = from_samples("deepmath", tmp_path, "--test_size", "0", "--min_difficulty", "4", "--no-tool")
    assert [row["extra_info"]["difficulty"] for row in splits["train"]] == [4.0, 6.0]
    assert not any(row["use_tool"] for row in splits["train"])


def test_the_split_depends_on_the_seed_and_not_on_the_order(tmp_path: Path) -> None:
    rows = __import__("rows")
    source = [{"question": f"q{i}", "n": i} for i in range(200)] + [{"question": "q7", "n": 1000}]
    splits = rows.divide(source, "question", 20, seed=1)
    backwards = rows.divide(source[::-1], "question", 20, seed=1)
    other = rows.divide(source, "question", 20, seed=2)

    def held_out(of: dict[str, list[dict[str, Any]]]) -> set[str]:
        return {row["question"] for row in of["test"]}

    assert held_out(splits) == held_out(backwards) != held_out(other)
    assert not held_out(splits) & {row["question"] for row in splits["train"]}
    assert len(splits["train"]) + len(splits["test"]) == len(source)
    assert [row["n"] for row in splits["train"]] == sorted(row["n"] for row in splits["train"])


def test_files_and_folders_of_both_kinds(tmp_path: Path) -> None:
    first = from_samples("gsm8k", tmp_path / "first", "--test_size", "1")
    lines = (SCRIPTS / "samples" / "gsm8k.jsonl").read_text().splitlines()
    source = tmp_path / "source"
    (source / "data").mkdir(parents=True)
    frame = pd.DataFrame([json.loads(line) for line in lines])
    frame[:2].to_parquet(source / "data" / "train-0.parquet")
    frame[2:].to_parquet(source / "data" / "train-1.parquet")
    second = made("gsm8k", tmp_path / "second", "--dataset_path", str(source), "--test_size", "1")
    assert [r["extra_info"]["question"] for r in second["train"]] == [
        r["extra_info"]["question"] for r in first["train"]
    ]
    limited = made("gsm8k", tmp_path / "third", "--dataset_path", str(source), "--test_size", "0", "--limit", "2")
    assert len(limited["train"]) == 2


def test_a_folder_with_a_test_split_of_its_own(tmp_path: Path) -> None:
    lines = (SCRIPTS / "samples" / "gsm8k.jsonl").read_text().splitlines()
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.jsonl").write_text("\n".join(lines[:3]))
    (source / "test.jsonl").write_text("\n".join(lines[3:]))
    splits = made("gsm8k", tmp_path / "out", "--dataset_path", str(source))
    assert (len(splits["train"]), len(splits["test"])) == (3, 2)


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        ("gsm8k", {"question": "q"}, "row 1 has no field 'answer'; it has: answer, question"),
        ("gsm8k", {"question": "q", "answer": "42"}, "row 1: field 'answer' ends in '42'"),
        ("deepmath", {"question": "q2"}, "row 1 has no field 'final_answer'"),
        ("search_r1", {"question": "q2", "golden_answers": []}, "row 1: field 'golden_answers' is empty"),
        ("acecoder", {"id": "x", "question": "q2"}, "row 1 has no tests"),
        ("aime", {"Problem": "q2"}, "row 1 has no field 'Answer'"),
    ],
)
def test_a_row_that_lacks_something_is_named(name: str, row: dict[str, Any], words: str, tmp_path: Path) -> None:
    good = json.loads((SCRIPTS / "samples" / f"{name}.jsonl").read_text().splitlines()[0])
    source = tmp_path / "source.jsonl"
    source.write_text("\n".join(json.dumps(entry) for entry in (good, row, good)))
    arguments = () if name == "aime" else ("--test_size", "0")
    result = run(name, tmp_path / "out", "--dataset_path", str(source), *arguments)
    assert result.exit_code != 0
    assert type(result.exception).__name__ == "RowError"
    assert words in str(result.exception)


def test_too_large_a_test_split_is_refused(tmp_path: Path) -> None:
    result = run("gsm8k", tmp_path, "--dataset_path", str(SCRIPTS / "samples" / "gsm8k.jsonl"), "--test_size", "5")
    assert "5 rows leave none for training" in str(result.exception)
    assert not list(tmp_path.glob("*.parquet"))


def test_reasoning_gym(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    arguments = ("--task", "basic_arithmetic,countdown", "--train_size", "12", "--test_size", "4")
    splits = made("reasoning", tmp_path / "a", *arguments)
    again = made("reasoning", tmp_path / "b", *arguments)
    questions = [row["extra_info"]["question"] for row in splits["train"]]
    assert questions == [row["extra_info"]["question"] for row in again["train"]]
    assert not set(questions) & {row["extra_info"]["question"] for row in splits["test"]}
    sources = [row["data_source"] for row in splits["test"]]
    assert sources == ["reasoning_gym/basic_arithmetic", "reasoning_gym/countdown"] * 2
    task = json.loads(splits["test"][1]["reward_model"]["ground_truth"])
    assert set(task) == {"numbers", "target"}
    refused = run("reasoning", tmp_path / "c", "--task", "sudoku")
    assert "'sudoku' is unknown" in str(refused.exception) or "sudoku is unknown" in str(refused.exception)


def test_every_task_of_reasoning_gym_that_is_offered_exists() -> None:
    pytest.importorskip("reasoning_gym")
    script = __import__("reasoning")
    made_of_all = list(script.problems(script.TASKS, len(script.TASKS), 0))
    assert [problem["task"] for problem in made_of_all] == list(script.TASKS)


def test_questions_for_databases_and_those_of_one_database_stay_together(tmp_path: Path) -> None:
    splits = from_samples("skysql", tmp_path, "--test_size", "1")
    used = {split: {row["extra_info"]["tools_kwargs"]["db_id"] for row in rows} for split, rows in splits.items()}
    assert sorted(map(sorted, used.values())) == [["farm"], ["school"]]
    rows = {row["extra_info"]["question"]: row for part in splits.values() for row in part}
    [cows] = [row for question, row in rows.items() if "cows" in question]
    assert cows["extra_info"]["question"] == (
        "Database schema:\nCREATE TABLE animals (id INTEGER, species TEXT)\n\n"
        "Known:\nA cow is of the species cattle.\n\nQuestion: How many cows are there?"
    )
    assert cows["reward_model"]["ground_truth"] == "SELECT COUNT(*) FROM animals WHERE species = 'cattle'"
    assert "<sql>" in cows["prompt"][0]["content"]
    assert rows["Name the oldest pupil."]["prompt"][1]["content"] == "Name the oldest pupil."
    bare = from_samples("skysql", tmp_path / "bare", "--test_size", "0", "--no-tool")
    assert all("<sql>" not in row["prompt"][0]["content"] and not row["use_tool"] for row in bare["train"])


PUBLISHED = [{"role": "system", "content": "Their words."}, {"role": "user", "content": "{question}: How many?"}]


@pytest.mark.parametrize(
    "published",
    [
        {"db_id": "zoo", "reward_spec": {"method": "rule", "ground_truth": "SELECT 2"}, "extra_info": {"index": 0}},
        {"reward_model": {"style": "rule", "ground_truth": "SELECT 2"}, "extra_info": {"db_id": "zoo", "index": 0}},
    ],
)
def test_published_rows_for_databases_keep_their_prompt_and_find_their_database(
    published: dict[str, Any], tmp_path: Path
) -> None:
    source = {"data_source": "spider", "prompt": PUBLISHED, **published}
    (tmp_path / "source").mkdir()
    for split in ("train", "validation"):
        pd.DataFrame([source]).to_parquet(tmp_path / "source" / f"{split}.parquet")
    given = ("--dataset_path", str(tmp_path / "source"), "--databases", str(tmp_path / "databases"))
    failed = run("skysql", tmp_path / "rows", *given)
    assert "there is no database 'zoo' of spider" in str(failed.exception)
    file = tmp_path / "databases" / "spider" / "database" / "zoo" / "zoo.sqlite"
    file.parent.mkdir(parents=True)
    file.write_text("its content")
    for _ in range(2):
        splits = made("skysql", tmp_path / "rows", *given)
    assert set(splits) == {"train", "test"}
    [row] = splits["train"]
    assert [dict(message) for message in row["prompt"]] == PUBLISHED
    assert row["reward_model"]["ground_truth"] == "SELECT 2"
    db_id = row["extra_info"]["tools_kwargs"]["db_id"]
    assert (tmp_path / "databases" / f"{db_id}.sqlite").read_text() == "its content"


@pytest.fixture
def looked_at(tmp_path: Path) -> Path:
    """A data set as Pixel Reasoner's is published: rows that name files, and the files."""
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "source"
    for path, size in {"images/1.png": (40, 30), "videos/2/01.jpg": (20, 10), "videos/2/02.jpg": (20, 10)}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", size).save(folder / path)
    common = {"answer": ["B", "b"], "qid": "q"}
    rows = [
        {"question": "Which bird?", "image": ["1.png"], "is_video": False, **common},
        {"question": "What falls? ", "image": ["2/01.jpg", "2/02.jpg"], "is_video": True, **common},
    ]
    pd.DataFrame(rows).to_parquet(folder / "release.parquet")
    return folder


def test_questions_about_images_and_frames(looked_at: Path, tmp_path: Path) -> None:
    """As a training reads them: the loop finds an image for each place."""
    [*rows] = made("pixel_reasoner", tmp_path / "rows", "--dataset_path", str(looked_at), "--test_size", "0")["train"]
    sizes = {}
    for row in rows:
        assert set(row) == {*COLUMNS, "images"}
        assert (row["reward_model"]["ground_truth"], row["extra_info"]["qid"]) == ("B", "q")
        told = read_conversation(list(row["prompt"]), row["images"], "row")
        assert "crop_image" in told.messages[0]["content"]
        assert "target_frames" in told.messages[0]["content"]
        kinds = [part["type"] for part in told.messages[1]["content"]]
        assert kinds == [*["image"] * len(told.images), "text"]
        sizes[row["extra_info"]["question"]] = [(image.width, image.height) for image in told.images]
    assert sizes == {"Which bird?": [(40, 30)], "What falls?": [(20, 10), (20, 10)]}


def test_questions_about_images_alone_without_tool(looked_at: Path, tmp_path: Path) -> None:
    given = ("--dataset_path", str(looked_at), "--test_size", "0", "--no-videos", "--no-tool")
    [row] = made("pixel_reasoner", tmp_path / "rows", *given)["train"]
    assert not row["use_tool"]
    assert not any("crop_image" in message["content"] for message in row["prompt"])
    assert row["prompt"][1]["content"].startswith("<image>Which bird?")


def test_an_image_that_is_not_there_is_named(looked_at: Path, tmp_path: Path) -> None:
    (looked_at / "images" / "1.png").unlink()
    failed = run("pixel_reasoner", tmp_path / "rows", "--dataset_path", str(looked_at), "--test_size", "0")
    assert "images/1.png" in str(failed.exception)
    assert "--media" in str(failed.exception)


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("terminal_tasks.py", ["--test_size", "1"], "1 rows leave none for training at --test_size 1; make it smaller"),
        ("terminal_tasks.py", ["--tasks", "no_such_folder"], "no_such_folder"),
        ("gsm8k.py", ["--dataset_path", "no_such_file.jsonl"], "no_such_file.jsonl"),
    ],
)
def test_what_a_script_cannot_do_is_one_line(tmp_path, script, arguments, words):
    task = tmp_path / "tasks" / "one"
    shutil.copytree(SCRIPTS.parent / "tasks" / "find-value", task)
    given = ["--tasks", str(task.parent)] if script.startswith("terminal") and "--tasks" not in arguments else []
    command = [sys.executable, str(SCRIPTS / script), "--local_dir", str(tmp_path / "out"), *given, *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert words in done.stderr
    assert "Traceback" not in done.stderr
