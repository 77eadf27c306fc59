"""Judge a repository by hidden tests, as swebench does: the reward is 1 if all of them pass, else 0.

    python3 -I verify.py /tests/spec.json /logs/verifier/reward.json

`swe.py` packs this file into the verifier of each row, with the specification and the hidden tests. It needs Python
3.8, the standard library, bash and git. It restores the files that the hidden tests change from the commit in the
specification, and trusts nothing of the workspace for that: each object of git is checked by its hash. Exit code 78:
the tests' patch does not fit the commit, which no change of the workspace can cause. Exit code 1: programs of the tests
cannot be ended, and a reward that is there may be theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time

NOT_JUDGED = 78
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
PASSED, FAILED, ERROR, SKIPPED, XFAIL = STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL")
SHADOWS = ("sitecustomize.py", "usercustomize.py", "pytest.py")
GUARDED = ("conftest.py", "pytest.ini", ".pytest.ini", *SHADOWS)
"""Files that change how tests run. They are as in the commit, unless the reference solution changes them; `SHADOWS` of
the commit are its own modules, and may change. Not among them: tox.ini, which images of Sphinx change."""
MAX_LOG_BYTES = 64 << 20
GIT_SECONDS = 60.0
END_SECONDS = 20.0
"""For the processes that a command left to end."""
_SUBREAPER, _DUMPABLE = 36, 4


class NotJudgedError(Exception):
    """The specification does not fit its own commit."""


class ChangedRepositoryError(Exception):
    """The workspace's repository does not contain the commit as it was."""


class LeftoverError(Exception):
    """A process is left, which could write a reward after this one. The exit code tells that it is none."""


class Workspace:
    """The folder with the repository, in this machine's file system."""

    def __init__(self, folder):
        self.folder = os.path.abspath(folder)

    def run(self, command, seconds, env=None, stdin=b""):
        """Return the exit code, None after a timeout, and the output. Everything that it started has ended."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            started = subprocess.Popen(
                command,
                stdin=given,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=clean_environment(env or {}),
                start_new_session=True,
            )
            try:
                code = started.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            end_descendants()
            output.seek(0)
            return code, output.read(MAX_LOG_BYTES)

    def write(self, path, content, executable=False):
        """Write a file, whatever is there. content: None removes it."""
        *folders, name = path.split("/")
        at = self.folder
        for folder in folders:
            at = os.path.join(at, folder)
            if os.path.islink(at) or not os.path.isdir(at):
                remove(at)
                os.mkdir(at)
        remove(os.path.join(at, name))
        if content is not None:
            with open(os.path.join(at, name), "wb") as file:
                file.write(content)
            os.chmod(os.path.join(at, name), 0o755 if executable else 0o644)

    def guarded_files(self):
        """Return the paths of `GUARDED` files, without those in hidden folders."""
        found = []
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [each for each in folders if each[0] != "." and each not in ("site-packages", "node_modules")]
            found += [os.path.relpath(os.path.join(folder, each), self.folder) for each in names if each in GUARDED]
        return found


class SandboxWorkspace:
    """The workspace of verl-tool's sandbox, which runs commands as another user (`in_workspace`)."""

    def __init__(self, module):
        self._module = module
        self._files = {}

    def run(self, command, seconds, env=None, stdin=b""):
        words = ["bash", "-c", 'exec "$@" 2>&1', "bash", *command]
        result = self._module.run(words, seconds=seconds, env=env or {}, files=self._files, stdin=stdin)
        self._files = {}
        return result.exit_code, result.stdout_bytes

    def write(self, path, content, executable=False):
        self.run(["rm", "-rf", "--", path], GIT_SECONDS)
        if content is not None:
            self._files[path] = content

    def guarded_files(self):
        tests = [word for name in GUARDED for word in ("-name", name, "-o")][:-1]
        _, output = self.run(
            ["find", ".", "-name", ".?*", "-type", "d", "-prune", "-o", "(", *tests, ")", "-print"], 60
        )
        return [line[2:] for line in output.decode(errors="replace").split("\n") if line.startswith("./")]


class Commit:
    """Files of a commit. Whoever changed the repository cannot change them: every object is checked by its hash."""

    def __init__(self, workspace, name):
        self._workspace, self._name = workspace, name
        self._trees = {}
        self._root = self._object("commit", name).split(b"\n")[0].split()[1].decode()

    def read(self, path):
        """Return a file's content and whether it is executable; (None, False) if there is none."""
        tree = self._root
        *folders, name = path.split("/")
        for folder in folders:
            mode, tree = self._entries(tree).get(folder.encode(), ("", ""))
            if mode != "40000":
                return None, False
        mode, blob = self._entries(tree).get(name.encode(), ("", ""))
        if not mode:
            return None, False
        if not mode.startswith("100"):
            raise NotJudgedError(f"{path} is no plain file in {self._name}")
        return self._object("blob", blob), mode == "100755"

    def guarded_files(self):
        """Return the paths of `GUARDED` files. This list alone is the repository's own word."""
        output = self._git("ls-tree", "-r", "-z", "--name-only", self._name).decode(errors="surrogateescape")
        return [path for path in output.split("\0") if path.rpartition("/")[2] in GUARDED]

    def _entries(self, tree):
        if tree not in self._trees:
            rest, entries, size = self._object("tree", tree), {}, len(tree) // 2
            while rest:
                mode, _, rest = rest.partition(b" ")
                name, _, rest = rest.partition(b"\0")
                entries[name] = (mode.decode(), rest[:size].hex())
                rest = rest[size:]
            self._trees[tree] = entries
        return self._trees[tree]

    def _object(self, kind, name):
        content = self._git("cat-file", kind, name)
        algorithm = hashlib.sha1 if len(name) == 40 else hashlib.sha256
        if algorithm(b"%s %d\0" % (kind.encode(), len(content)) + content).hexdigest() != name:
            raise ChangedRepositoryError(f"{kind} {name} has other content")
        return content

    def _git(self, *arguments):
        command = ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", *arguments]
        code, output = self._workspace.run(
            command, GIT_SECONDS, {"GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1"}
        )
        if code != 0:
            raise ChangedRepositoryError(
                f"git {arguments[0]} {arguments[-1]}: {output[-200:].decode(errors='replace')}"
            )
        return output


def clean_environment(env):
    """Return the environment for the tests: the container's own, without what protects the verifier."""
    dropped = ("PYTHON", "GIT_", "TMPDIR", "HOME")
    own = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    try:
        home = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a user without a name
        home = "/"
    return {**own, "HOME": home, **env}


def remove(path):
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def protect():
    """Adopt all descendants, so that none is left, and let no other process read or change this one."""
    try:
        system = ctypes.CDLL(None, use_errno=True)
        system.prctl(_SUBREAPER, 1, 0, 0, 0)
        system.prctl(_DUMPABLE, 0, 0, 0, 0)
    except (OSError, AttributeError):
        print("no prctl here: programs that the tests leave are not ended")


def end_descendants():
    """End every process that this one started, or that one of them started. Raises LeftoverError."""
    deadline = time.monotonic() + END_SECONDS
    while True:
        for each in children_of(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(each, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        if time.monotonic() > deadline:
            raise LeftoverError(f"programs start others faster than they are ended, for {END_SECONDS:g} s")
        time.sleep(0.005)


def children_of(parent):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == parent:
                        found.append(int(name))
            except (OSError, ValueError, IndexError):
                pass
    return found


def apply_patch(files, patch):
    """Return `files` (content and executable by path; content None: not there) after a patch. Raises NotJudgedError."""
    folder = tempfile.mkdtemp()
    try:
        scratch = Workspace(folder)
        for path, (content, executable) in files.items():
            scratch.write(path, content, executable)
        env = {"GIT_CEILING_DIRECTORIES": os.path.dirname(folder), "GIT_CONFIG_NOSYSTEM": "1", "HOME": folder}
        code, output = scratch.run(["git", "apply", "--whitespace=nowarn", "-"], GIT_SECONDS, env, patch.encode())
        if code != 0:
            raise NotJudgedError("the tests' patch does not fit: " + output[-500:].decode(errors="replace"))
        result = {}
        for path in files:
            name = os.path.join(folder, path)
            there = os.path.isfile(name)
            with open(name if there else os.devnull, "rb") as file:
                result[path] = (file.read() if there else None, there and os.access(name, os.X_OK))
        return result
    finally:
        shutil.rmtree(folder)


def prepare(workspace, spec, hidden):
    """Put the hidden tests in their place, and the files that guard them."""
    commits = {}

    def commit(name):
        if name not in commits:
            commits[name] = Commit(workspace, name)
        return commits[name]

    guard = spec.get("guard")
    if guard:
        exempt = {*guard["exempt"], *hidden}
        for path in sorted({*workspace.guarded_files(), *commit(guard["commit"]).guarded_files()} - exempt):
            content, executable = commit(guard["commit"]).read(path)
            if content is None or path.rpartition("/")[2] not in SHADOWS:
                workspace.write(path, content, executable)
    for entry in spec["restore"]:
        files = {path: commit(entry["commit"]).read(path) for path in entry["paths"]}
        if entry.get("patch"):
            files = apply_patch(files, entry["patch"])
        for path, (content, executable) in files.items():
            workspace.write(path, content, executable)
    for path in spec.get("remove", []):
        workspace.write(path, None)
    for path, content in hidden.items():
        workspace.write(path, content)


def hidden_files(folder):
    """Return the contents of the files below a folder, by path."""
    found = {}
    for at, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(at, name), "rb") as file:
                found[os.path.relpath(os.path.join(at, name), folder)] = file.read()
    return found


def run_tests(workspace, spec):
    """Return the exit code of the tests, None after a timeout, and their output alone."""
    script = "\n".join(
        [
            "set -uxo pipefail",
            *spec["before"],
            f"echo '{START}'",
            spec["test"],
            "code=$?",
            f"echo '{END}'",
            "exit $code",
        ]
    )
    # Bytecode beside a source may be another file's: planted, or of what was written in the same second.
    bytecode = {"PYTHONPYCACHEPREFIX": f"/tmp/{secrets.token_hex(16)}"}
    code, output = workspace.run(["bash", "-c", script], spec["seconds"], {**spec["env"], **bytecode})
    log = output.decode("utf-8", "replace").replace("\r\n", "\n")
    return code, log.partition(f"\n{START}\n")[2].rpartition(f"\n{END}\n")[0] or log


# Parsers of logs: the status of each test by its name, as those of the same name in swebench and its kin.


def parse_pytest(log, options=False):
    statuses = {}
    for line in log.split("\n"):
        if not line.startswith(STATUSES):
            continue
        words = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split()
        if len(words) < 2 or is_skip_count(words):
            continue
        name = words[1]
        match = re.search(r"(.*?)\[(.*)\]", name) if options else None
        if match:
            main, option = match.groups()
            if option.startswith("/") and not option.startswith("//") and "*" not in option:
                option = "/" + option.split("/")[-1]
            name = f"{main}[{option}]"
        statuses[name] = words[0]
    return statuses


def parse_pytest_options(log):
    return parse_pytest(log, options=True)


def parse_matplotlib(log):
    return parse_pytest(log.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3"))


def parse_pytest_v2(log):
    statuses = {}
    for line in plain_lines(log):
        if line.startswith(STATUSES):
            words = (line.split(" - ", 1)[0] if line.startswith(FAILED) else line).split()
            if len(words) > 1 and not is_skip_count(words):
                statuses[" ".join(words[1:])] = words[0]
        elif line.endswith(STATUSES):
            words = line.split()
            if len(words) > 1:
                statuses[" ".join(words[:-1])] = words[-1]
    return statuses


def parse_pydantic(log):
    statuses = {}
    for line in plain_lines(log):
        line = re.sub(r"FAILED\s*\[.*?\]", FAILED, line)
        if line.startswith(STATUSES):
            words = (line.replace(" - ", " ") if line.startswith(FAILED) else line).split()
            statuses.update({words[1]: words[0]} if len(words) > 1 else {})
        elif line.endswith(STATUSES):
            words = line.split()
            statuses.update({words[0]: words[1]} if len(words) > 1 else {})
    return statuses


def parse_seaborn(log):
    statuses = {}
    for line in log.split("\n"):
        words = line.split()
        if len(words) < 2:
            continue
        if line.startswith((FAILED, PASSED)):
            statuses[words[1]] = FAILED if line.startswith(FAILED) else PASSED
        elif f" {PASSED} " in line and words[1] == PASSED:
            statuses[words[0]] = PASSED
    return statuses


def parse_sympy(log):
    statuses = {f"{path}.py:{name}": FAILED for _, path, name, _ in re.findall(r"(_*) (.*)\.py:(.*) (_*)", log)}
    for line in map(str.strip, log.split("\n")):
        for ending, status in ((" E", ERROR), (" F", FAILED), (" ok", PASSED)):
            if line.startswith("test_") and line.endswith(ending):
                statuses[line.split()[0]] = status
    return statuses


def parse_django(log):
    """unittest's, with the ways in which Django interrupts it."""
    statuses, last = {}, None
    for line in map(str.strip, log.split("\n")):
        if "--version is equivalent to version" in line:
            statuses["--version is equivalent to version"] = PASSED
        if " ... " in line:
            last = line.split(" ... ")[0]
        for suffix in (" ... ok", " ... OK", " ...  OK"):
            if line.endswith(suffix):
                if line.startswith("Applying sites.0002_alter_domain_unique...test_no_migrations"):
                    line = line.split("...", 1)[-1].strip()
                statuses[line.rsplit(suffix, 1)[0]] = PASSED
                break
        if " ... skipped" in line:
            statuses[line.split(" ... skipped")[0]] = SKIPPED
        for word, status in (("FAIL", FAILED), ("ERROR", ERROR)):
            if line.endswith(f" ... {word}"):
                statuses[line.split(f" ... {word}")[0]] = status
            if line.startswith(f"{word}:"):
                statuses[[*line.split(), ""][1].strip()] = status
        if line.startswith("ok") and last is not None:
            statuses[last] = PASSED
    for pattern in (
        r"^(.*?)\s\.\.\.\sTesting\ against\ Django\ installed\ in\ ((?s:.*?))\ silenced\)\.\nok$",
        r"^(.*?)\s\.\.\.\sInternal\ Server\ Error:\ \/(.*)\/\nok$",
        r"^(.*?)\s\.\.\.\sSystem check identified no issues \(0 silenced\)\nok$",
    ):
        statuses.update({match.group(1): PASSED for match in re.finditer(pattern, log, re.MULTILINE)})
    return statuses


def parse_swesmith(log):
    """``pytest --verbose``: the name, then the status."""
    found = (re.match(rf"^(\S+)\s+({'|'.join(STATUSES)})", line) for line in log.split("\n"))
    return {match.group(1): match.group(2) for match in found if match}


def parse_r2e(log):
    """The short summary, names without their file."""
    statuses = {}
    for line in re.sub(r"\x1b\[[0-9;]*m|\r", "", log).partition("short test summary info")[2].strip().split("\n"):
        status = next((each for each in (PASSED, FAILED, ERROR) if each in line), None)
        name = ".".join(line.split("::")[1:]).split(" - ")[0]
        if status and name:
            statuses[name] = status
    return statuses


PARSERS = {
    "pytest": parse_pytest,
    "pytest_options": parse_pytest_options,
    "pytest_v2": parse_pytest_v2,
    "pydantic": parse_pydantic,
    "matplotlib": parse_matplotlib,
    "seaborn": parse_seaborn,
    "sympy": parse_sympy,
    "django": parse_django,
    "swesmith": parse_swesmith,
    "r2e": parse_r2e,
}


def plain_lines(log):
    """Return the lines without colours and control characters."""
    escapes = str.maketrans("", "", "".join(map(chr, range(1, 32))))
    return [re.sub(r"\[(\d+)m", "", line).translate(escapes) for line in log.split("\n")]


def is_skip_count(words):
    return words[0] == SKIPPED and re.match(r"^\[\d+\]$", words[1]) is not None


def status_of(case, statuses):
    """Return a test's status. A name that the data set cut within its parameters has that of its continuations."""
    if case in statuses or case.count("[") <= case.count("]"):
        return statuses.get(case)
    found = {statuses[name] for name in statuses if name.startswith(case)}
    return min(found) if len({each in (PASSED, XFAIL) for each in found}) == 1 else None


def grade(spec, code, statuses):
    """Return the numbers of ``reward.json``. code: of the tests."""
    if code is None or (code != 0 and not any(each in (FAILED, ERROR) for each in statuses.values())):
        statuses = {}  # no log of the tests: it has no failure, and they have failed
    fixed = [status_of(case, statuses) in (PASSED, XFAIL) for case in spec["fail_to_pass"]]
    still = [status_of(case, statuses) in (PASSED, XFAIL, SKIPPED) for case in spec["pass_to_pass"]]
    expected = spec.get("expected")
    met = bool(fixed) and all(fixed) and all(still) if expected is None else statuses == expected
    resolved = bool(statuses) and met  # with no test that must pass, whatever was done would be right
    return {
        "reward": float(resolved),
        "resolved": float(resolved),
        "fail_to_pass": sum(fixed) / max(1, len(fixed)),
        "pass_to_pass": sum(still) / len(still) if still else 1.0,
        "tests": len(statuses),
    }


def statuses_in(workspace, spec, log, folder):
    """Return the statuses of a log, by the parser of that name or by the row's own program."""
    if spec["parser"] != "program":
        return PARSERS[spec["parser"]](log)
    scratch = Workspace(tempfile.mkdtemp())
    for name, content in (("stdout", log.encode()), ("stderr", b"")):
        scratch.write(name, content)
    program = [sys.executable, "-I", os.path.join(folder, "parsing_script.py"), "stdout", "stderr", "output.json"]
    scratch.run(program, GIT_SECONDS)
    with open(os.path.join(scratch.folder, "output.json"), encoding="utf-8") as file:
        return {test["name"]: test["status"] for test in json.load(file)["tests"]}


def find_workspace(spec):
    """Return the sandbox's workspace where there is one, else the folder of the specification.

    In a container, that is a copy on the image's own programs, and those of the trajectory's container are not.
    """
    if os.environ.get("VERL_TOOL_WORKSPACE") == "container":
        return Workspace(spec["workdir"])
    for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if folder and os.path.isfile(os.path.join(folder, "in_workspace.py")):
            sys.path.insert(0, folder)
            import in_workspace

            return SandboxWorkspace(in_workspace)
    return Workspace(spec["workdir"])


def main(spec_path, reward_path):
    protect()
    folder = os.path.dirname(os.path.abspath(spec_path))
    with open(spec_path, encoding="utf-8") as file:
        spec = json.load(file)
    spec["env"] = {"VERIFIER_FOLDER": folder, **spec["env"]}
    workspace, hidden = find_workspace(spec), hidden_files(os.path.join(folder, "hidden"))
    try:
        prepare(workspace, spec, hidden)
    except NotJudgedError as error:
        print(f"not judged: {error}")
        return NOT_JUDGED
    except ChangedRepositoryError as error:
        print(f"the repository's commit is gone: {error}")
        numbers, log = grade(spec, None, {}), ""
    else:
        code, log = run_tests(workspace, spec)
        statuses = statuses_in(workspace, spec, log, folder)
        numbers = grade(spec, code, statuses)
        print(log[-1500:])
        print(f"exit code of the tests: {'none, they took too long' if code is None else code}")
    print(json.dumps(numbers))
    remove(reward_path)
    with open(reward_path, "w", encoding="utf-8") as file:
        json.dump(numbers, file)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except LeftoverError as error:
        sys.exit(f"no reward: {error}")
