"""Repositories with an issue and hidden tests, read from the rows in which they are published. Used by `swe.py`.

| Source | Published as | Image | Hidden tests |
|---|---|---|---|
| `swebench` | SWE-bench/SWE-bench, _Lite, _Verified | swebench/sweb.eval.x86_64.ID | `test_patch` on `base_commit` |
| `swegym` | SWE-Gym/SWE-Gym, -Lite | xingyaoww/sweb.eval.x86_64.ID | the same |
| `swesmith` | SWE-bench/SWE-smith, -py | `image_name`, one for each repository | files that the bug's branch removes |
| `r2e_gym` | R2E-Gym/R2E-Gym-Subset, -Lite, -V1 | `docker_image` | in `execution_result_content` |
| `nemotron` | NeMo-Gym's rows, as in NVIDIA's SWE blends | of the set that a row names | of that set |

Rows of SWE-bench that have ``eval_script`` and ``log_parser`` (since 2026) say themselves how they are evaluated. For
others the package swebench 4 does (``pip install 'verl-tool[swe]'``).
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as default
from enum import Enum
from typing import Any

from rows import RowError, field
from swe_verifier import PARSERS, PASSED, parse_r2e

ACTIVATE = ("source /opt/miniconda3/bin/activate", "conda activate testbed")
SWEGYM_TESTS = {
    "python/mypy": "pytest -n0 -rA -k",
    "getmoto/moto": "pytest -n0 -rA",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "project-monai/monai": "pytest -rA",
    "iterative/dvc": "pytest -rA",
    "bokeh/bokeh": "pytest -rA -n0",
    "modin-project/modin": "pytest -n0 -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "facebookresearch/hydra": "pytest -rA --tb=long",
}
"""By repository, from SWE-Gym's fork of swebench (swebench/harness/constants.py). Its install commands need a network,
and are in the images already."""
SWESMITH_TEST = "pytest --disable-warnings --color=no --tb=no --verbose"
SWESMITH_TESTS = {
    "tkrajina__gpxpy": (SWESMITH_TEST, "swesmith"),
    "mido__mido": (f"{SWESMITH_TEST} -rs -c /dev/null", "swesmith"),
    "paramiko__paramiko": ("pytest -rA --color=no --disable-warnings", "pytest"),
    "pydantic__pydantic": (f"/root/.local/bin/uv run {SWESMITH_TEST}", "swesmith"),
    "tornadoweb__tornado": ("python -m tornado.test --verbose", "django"),
    "un33k__python-slugify": ("python test.py --verbose", "django"),
}
"""By repository, where it is another than `SWESMITH_TEST`: swesmith/profiles/python.py."""
SWESMITH_UNKNOWN = ("HIPS__autograd", "python__mypy")
R2E_TEST = "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' {} -W ignore -m pytest -rA r2e_tests"
"""tests_cmd of src/r2egym/repo_analysis/repo_analysis_args.py."""
R2E_SETUP = """\
rm -rf /r2e_tests /run_tests.sh /root/r2e_tests /root/run_tests.sh r2e_tests run_tests.sh
git checkout -q --detach
git for-each-ref --format='%(refname)' | while read -r name; do git update-ref -d "$name"; done
rm -rf .git/logs .git/ORIG_HEAD .git/FETCH_HEAD
git gc -q --prune=now
"""
"""No hidden tests, and no later commit, which has the solution."""
SWESMITH_SETUP = """\
git apply /swe-setup/bug.patch
rm -f -- {files}
git ls-files -z > /tmp/tracked
rm -rf .git && git init -q
while IFS= read -r -d '' path; do [ ! -e "$path" ] || git add -f -- "$path"; done < /tmp/tracked
rm /tmp/tracked
git -c user.name=swe -c user.email=swe@localhost commit -qm 'Initial commit'
"""
"""The bug's branch without the history that would undo it."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_ALIASES = {
    "pytest": "astroid flask marshmallow pvlib pyvista sqlfluff xarray",
    "pytest_options": "pydicom requests pylint",
    "pytest_v2": "astropy scikit sphinx",
}
_PARSER_OF = {alias: name for name, aliases in _ALIASES.items() for alias in aliases.split()}


@dataclass(frozen=True)
class Problem:
    """A repository, what is wrong with it, and how to judge it."""

    name: str
    repository: str
    statement: str
    image: str
    """As it is published."""
    test: str
    """The command that runs the tests, behind the lines `before`."""
    parser: str
    """One of `PARSERS`, or ``program``: the row's own."""
    fail_to_pass: Sequence[str]
    pass_to_pass: Sequence[str]
    workdir: str = "/testbed"
    before: Sequence[str] = ()
    base_commit: str = ""
    """Empty: that of the image, which is to be asked."""
    restore: Sequence[Mapping[str, Any]] = ()
    """Files that tests need as they are in a ``commit``: ``paths``, and a ``patch`` of them."""
    hidden: Mapping[str, str] = default(default_factory=dict)
    """Contents of hidden test files, by path."""
    hide: Sequence[str] = ()
    """Test files of the image that become `hidden`."""
    expected: Mapping[str, str] | None = None
    """The status of every test, where no other may be."""
    setup: str = ""
    """Bash in `workdir` that makes the problem's image of the published one."""
    setup_files: Mapping[str, str] = default(default_factory=dict)
    """In ``/swe-setup`` meanwhile."""
    solution: str = ""
    """The reference solution, a patch for ``git apply`` with `solution_flags`."""
    solution_flags: str = ""
    programs: Mapping[str, str] = default(default_factory=dict)
    """Further files of the verifier."""
    env: Mapping[str, str] = default(default_factory=dict)


def paths_of(patch: str) -> list[str]:
    """Return the files that a patch changes, adds or removes."""
    found = re.findall(r"^diff --git a/(.*) b/(.*)$", patch, re.MULTILINE)
    return sorted({path for pair in found for path in pair})


def patch_in(source: Mapping[str, Any], name: str, index: int) -> str:
    """Return a column with a patch. Raises RowError if it is none."""
    patch: str = field(source, name, index)
    read = subprocess.run(["git", "apply", "--numstat"], input=patch.encode(), capture_output=True, check=False)
    if read.returncode != 0 or not paths_of(patch):
        why = read.stderr.decode(errors="replace").strip() or "it names no file"
        raise RowError(f"row {index}: field {name!r} is no patch: {why:.200}")
    return patch if patch.endswith("\n") else patch + "\n"


def tests_in(source: Mapping[str, Any], name: str, index: int) -> list[str]:
    """Return a column with names of tests, a list or its JSON. Raises RowError."""
    value = source.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise RowError(f"row {index}: field {name!r} is no JSON: {value[:80]!r}") from None
    if not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise RowError(
            f"row {index}: field {name!r} is {value!r:.80}; it must be a list of names of tests, or its JSON"
        )
    return list(value)


def failing_tests_in(source: Mapping[str, Any], name: str, index: int) -> list[str]:
    """Return a column with the tests that a solution must make pass. Raises RowError if there is none: the verifier
    would reward what changes nothing."""
    tests = tests_in(source, name, index)
    if not tests:
        raise RowError(f"row {index}: field {name!r} is empty: there is nothing to solve")
    return tests


def commit_in(source: Mapping[str, Any], name: str, index: int) -> str:
    """Return a column with a commit's full hash. Raises RowError."""
    commit: str = field(source, name, index)
    if not _COMMIT.fullmatch(commit):
        raise RowError(f"row {index}: field {name!r} is {commit[:80]!r}; it must be the full hash of a commit")
    return commit


def json_in(source: Mapping[str, Any], name: str, index: int) -> Mapping[str, Any]:
    """Return a column with an object, or its JSON. Raises RowError."""
    value = field(source, name, index, str, Mapping)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        value = None
    if not isinstance(value, Mapping):
        raise RowError(f"row {index}: field {name!r} is no JSON object")
    return value


def swebench_problem(source: Mapping[str, Any], index: int) -> Problem:
    """SWE-bench. Raises RowError."""
    name, patch = field(source, "instance_id", index), patch_in(source, "test_patch", index)
    if source.get("eval_script"):
        before, test = split_eval_script(field(source, "eval_script", index), index)
        parser = field(source, "log_parser", index)
    else:
        before, test, parser = _swebench_commands({**source, "test_patch": patch}, index)
    image = source.get("image") or f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
    return _with_patch(source, index, image, before, test, _parser(parser, index))


def swegym_problem(source: Mapping[str, Any], index: int) -> Problem:
    """SWE-Gym. Raises RowError."""
    name, repository = field(source, "instance_id", index), field(source, "repo", index).lower()
    patch = patch_in(source, "test_patch", index)
    test = SWEGYM_TESTS.get(repository)
    if test is None:
        raise RowError(f"row {index}: field 'repo' is {repository!r}; known: {', '.join(SWEGYM_TESTS)}")
    if repository == "python/mypy":
        cases = re.findall(r"\[case ([^\]]+)\]", patch)
        test += f' "{" or ".join(cases)}"'
    else:
        test = " ".join([test, *_test_files(patch)])
    before = [*ACTIVATE, *(["export PYTHONPATH=${PYTHONPATH:-}:$PWD"] if repository == "conan-io/conan" else [])]
    image = f"xingyaoww/sweb.eval.x86_64.{name.lower().replace('__', '_s_')}:latest"
    return _with_patch(source, index, image, before, test, "pydantic" if "pydantic" in repository else "pytest")


def swesmith_problem(source: Mapping[str, Any], index: int) -> Problem:
    """SWE-smith, whose `patch` is the bug. Raises RowError."""
    name, bug = field(source, "instance_id", index), patch_in(source, "patch", index)
    failing, passing = failing_tests_in(source, "FAIL_TO_PASS", index), tests_in(source, "PASS_TO_PASS", index)
    image = field(source, "image_name", index)
    image = image if "/" in image else f"jyangballin/{image.replace('__', '_1776_')}"
    repository = field(source, "repo", index).rpartition("/")[2].rpartition(".")[0]
    if repository in SWESMITH_UNKNOWN:
        raise RowError(f"row {index}: field 'repo': the tests of {repository} are not known here")
    test, parser = SWESMITH_TESTS.get(repository, (SWESMITH_TEST, "swesmith"))
    hide, others = ({_file_of(case, index) for case in cases} for cases in (failing, passing))
    if hide & {*paths_of(bug)}:
        raise RowError(f"row {index}: the bug is in a hidden test file, {min(hide & {*paths_of(bug)})}")
    files = sorted(hide | others)
    return Problem(
        **{"name": name, "repository": repository, "statement": field(source, "problem_statement", index)},
        **{"image": image if ":" in image else f"{image}:latest", "fail_to_pass": failing, "pass_to_pass": passing},
        test=" ".join([test, *map(shlex.quote, files)]) if test.startswith(SWESMITH_TEST) else test,
        before=ACTIVATE,
        parser=parser,
        restore=[{"commit": "", "paths": sorted(others - hide)}],
        hide=sorted(hide),
        setup=SWESMITH_SETUP.format(files=" ".join(map(shlex.quote, sorted(hide)))),
        setup_files={"bug.patch": bug},
        solution=bug,
        solution_flags="--reverse",
    )


def r2e_problem(source: Mapping[str, Any], index: int) -> Problem:
    """R2E-Gym: every test must have its expected status. Raises RowError."""
    executed = json_in(source, "execution_result_content", index)
    names, codes = executed.get("test_file_names"), executed.get("test_file_codes")
    if not isinstance(names, list) or not isinstance(codes, list) or len(names) != len(codes) or not names:
        raise RowError(f"row {index}: field 'execution_result_content' needs test_file_names and test_file_codes")
    named = {re.sub(r"\x1b\[\d+m", "", test).split(" - ")[0]: status for test, status in _expected(source, index)}
    expected = {test: status for test, status in named.items() if test}
    before = parse_r2e(executed.get("old_commit_res_stdout") or "")
    passing = [test for test, status in expected.items() if status == PASSED]
    if before == expected:
        raise RowError(
            f"row {index}: field 'expected_output_json' is what tests give before: there is nothing to solve"
        )
    statement = field(source, "problem_statement", index)
    issue = re.search(r"\[ISSUE\](.*)\[/ISSUE\]", statement, re.DOTALL)
    qt = field(source, "repo_name", index) == "orange3"
    test = R2E_TEST.format(("xvfb-run --auto-servernum " if qt else "") + ".venv/bin/python")
    image = field(source, "docker_image", index)
    return Problem(
        name=f"{source['repo_name']}-{field(source, 'commit_hash', index)}",
        repository=source["repo_name"],
        statement=(issue[1] if issue else statement).strip(),
        image=image if ":" in image.rpartition("/")[2] else f"{image}:latest",
        test=f"QT_QPA_PLATFORM=minimal {test}" if qt else test,
        parser="r2e",
        fail_to_pass=[test for test in passing if before.get(test) != PASSED],
        pass_to_pass=[test for test in passing if before.get(test) == PASSED],
        hidden={f"r2e_tests/{name}": code for name, code in zip(names, codes, strict=True)}
        | ({} if "__init__.py" in names else {"r2e_tests/__init__.py": ""}),
        expected=expected,
        setup=R2E_SETUP,
    )


def nemotron_problem(source: Mapping[str, Any], index: int) -> Problem:
    """A row of NeMo-Gym: of one of the other sets, or of its own. Raises RowError."""
    parameters = field(source, "responses_create_params", index, Mapping)
    info = {**(parameters.get("metadata") or {}), **(source.get("verifier_metadata") or {})}
    instance = {**source, **info, **(json_in(info, "instance_dict", index) if info.get("instance_dict") else {})}
    dataset = str(info.get("dataset_name") or source.get("dataset_name") or ("SWE-bench" if "subset" in source else ""))
    if dataset == "nv-internal-1":
        problem = _nv_internal(instance, index)
    elif "R2E-Gym" in dataset:
        problem = r2e_problem(instance, index)
    elif "SWE-Gym" in dataset:
        problem = swegym_problem(instance, index)
    elif re.search(r"SWE-bench(_Verified|_Lite)?$", dataset):
        problem = swebench_problem(instance, index)
    else:
        known = "SWE-bench, SWE-bench_Lite, SWE-bench_Verified, SWE-Gym, R2E-Gym, nv-internal-1"
        raise RowError(f"row {index}: field 'dataset_name' is {dataset!r}; known: {known}")
    return problem


def _nv_internal(source: Mapping[str, Any], index: int) -> Problem:
    """NVIDIA's own: a script runs the tests of a later commit, and another reads what it printed."""
    command = str(source.get("before_repo_set_cmd") or "").strip().split("\n")[-1]
    match = re.fullmatch(r"git checkout ([0-9a-f]{40}|[0-9a-f]{64}) -- (.+)", command)
    if match is None:
        words = "end with 'git checkout COMMIT -- FILES', which brings the tests"
        raise RowError(f"row {index}: field 'before_repo_set_cmd' must {words}; it ends with {command[:80]!r}")
    formatter = source.get("container_formatter")
    formatter = formatter[0] if isinstance(formatter, list) and formatter else formatter
    if not isinstance(formatter, str) or not formatter.startswith("docker://"):
        raise RowError(f"row {index}: field 'container_formatter' must be docker://IMAGE; it is {formatter!r:.80}")
    name, select = field(source, "instance_id", index), "_select" if source.get("fail_to_pass_select") else ""
    files = ",".join(tests_in(source, "selected_test_files_to_run", index))
    lines = (source.get("base_dockerfile") or "") + "\n" + (source.get("instance_dockerfile") or "")
    env = re.findall(r"^\s*ENV\s+(\w+)\s*[=\s]\s*(.*?)\s*$", lines, re.MULTILINE)
    return Problem(
        **{"name": name, "repository": str(source.get("repo", "")), "workdir": "/app", "parser": "program"},
        statement=field(source, "problem_statement", index),
        image=formatter.removeprefix("docker://").format(instance_id=name),
        test=f'bash "$VERIFIER_FOLDER/run_script.sh" {shlex.quote(files)}',
        fail_to_pass=failing_tests_in(source, f"fail_to_pass{select}", index),
        pass_to_pass=tests_in(source, f"pass_to_pass{select}", index),
        base_commit=commit_in(source, "base_commit", index),
        restore=[{"commit": match[1], "paths": sorted(shlex.split(match[2]))}],
        programs={each: field(source, each, index) for each in ("run_script.sh", "parsing_script.py")},
        env={key: value.strip("\"'") for key, value in env},
        solution=str(source.get("patch") or ""),
    )


class Source(str, Enum):
    """Whose rows are read."""

    swebench = "swebench"
    swegym = "swegym"
    swesmith = "swesmith"
    r2e_gym = "r2e_gym"
    nemotron = "nemotron"


READERS: dict[Source, Callable[[Mapping[str, Any], int], Problem]] = {
    Source.swebench: swebench_problem,
    Source.swegym: swegym_problem,
    Source.swesmith: swesmith_problem,
    Source.r2e_gym: r2e_problem,
    Source.nemotron: nemotron_problem,
}


def split_eval_script(script: str, index: int) -> tuple[list[str], str]:
    """Return the lines before the tests, and the tests, of an evaluation script of swebench. What changes test files is
    left out, since the verifier does that itself. Raises RowError."""
    script = re.sub(r"^git apply .*<<'(\w+)'\n(?:.*\n)*?\1$", "", script, flags=re.MULTILINE)
    lines = [line for line in script.split("\n") if line.strip() and not re.match(r"#!|set -|git checkout ", line)]
    try:
        start, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in (" Start Test", " End Test"))
    except (StopIteration, RuntimeError):
        raise RowError(f"row {index}: field 'eval_script' has no marks for start and end of the tests") from None
    shown = ("git status", "git show", "git diff", "git -c core.fileMode")
    return [line for line in lines[:start] if not line.startswith(shown)], "\n".join(lines[start + 1 : end])


def _swebench_commands(source: Mapping[str, Any], index: int) -> tuple[list[str], str, str]:
    """By the package swebench 4: lines before the tests, the tests, and the name of the log's parser."""
    try:
        from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
        from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
        from swebench.harness.test_spec.python import get_test_directives
    except ImportError as error:
        words = "which only the package swebench 4 evaluates: source scripts/env.sh train swe"
        raise ValueError(f"row {index} has no field 'eval_script', {words} ({error})") from None
    repository, version = field(source, "repo", index), field(source, "version", index)
    specs = MAP_REPO_VERSION_TO_SPECS.get(repository, {}).get(version)
    if specs is None or repository not in MAP_REPO_TO_PARSER:
        raise RowError(f"row {index}: swebench has no specification of {repository} {version}")
    before = [*ACTIVATE, *specs.get("eval_commands", []), *([specs["install"]] if "install" in specs else [])]
    test = " ".join([specs["test_cmd"], *get_test_directives(source)])
    return before, test, MAP_REPO_TO_PARSER[repository].__name__


def _with_patch(
    source: Mapping[str, Any], index: int, image: str, before: Sequence[str], test: str, parser: str
) -> Problem:
    """A problem whose hidden tests are a patch."""
    patch, base = patch_in(source, "test_patch", index), commit_in(source, "base_commit", index)
    return Problem(
        name=field(source, "instance_id", index),
        repository=field(source, "repo", index),
        statement=field(source, "problem_statement", index),
        fail_to_pass=failing_tests_in(source, "FAIL_TO_PASS", index),
        pass_to_pass=tests_in(source, "PASS_TO_PASS", index),
        restore=[{"commit": base, "paths": paths_of(patch), "patch": patch}],
        solution=patch_in(source, "patch", index),
        **{"image": image, "before": before, "test": test, "parser": parser, "base_commit": base},
    )


def _parser(name: str, index: int) -> str:
    short = name.removeprefix("parse_log_")
    short = _PARSER_OF.get(short, short)
    if short not in PARSERS:
        raise RowError(f"row {index}: logs of {name!r} cannot be read; known: {', '.join(PARSERS)}")
    return short


def _test_files(patch: str) -> list[str]:
    """As swebench chooses them: files of the patch that are no data."""
    data = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
    return [path for path in re.findall(r"^diff --git a/.* b/(.*)$", patch, re.MULTILINE) if not path.endswith(data)]


def _file_of(case: str, index: int) -> str:
    """The file of a test that is named as in pytest or unittest."""
    if "::" in case:
        return case.split("::")[0].removeprefix("../dev/")
    match = re.search(r"\s\(([\w.]+)\)", case)
    if match is None:
        raise RowError(f"row {index}: the test {case[:80]!r} names no file")
    return "test.py" if match[1].startswith("__main__") else "/".join(match[1].split(".")[:-1]) + ".py"


def _expected(source: Mapping[str, Any], index: int) -> list[tuple[str, str]]:
    statuses = json_in(source, "expected_output_json", index)
    if not statuses:
        raise RowError(f"row {index}: field 'expected_output_json' has no test")
    return list(statuses.items())
