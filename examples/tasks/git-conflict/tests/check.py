"""Asks git in the workspace for the merge's parents and file, and compares both with the right ones."""

import configparser
from pathlib import Path

from in_workspace import WorkspaceError, run

PARENTS = {"ce19bebec1346e3a37007444d641fcba60266cf7", "1f925e389379d91af395b44ce2aceaabd9b926cd"}
SETTINGS = {
    "server": {"host": "localhost", "port": "8080", "timeout": "45", "workers": "8"},
    "log": {"level": "warning", "format": "short"},
}


def git(*arguments):
    result = run(["git", "-C", "project", *arguments], seconds=10)
    return result.stdout if result.exit_code == 0 and not result.truncated else ""


right = False
try:
    parents = git("rev-list", "--parents", "-n", "1", "main").split()[1:]
    settings = configparser.ConfigParser(interpolation=None)
    settings.read_string(git("show", "main:settings.ini"))
    found = {name: dict(settings[name]) for name in settings.sections()}
    right = len(parents) == 2 and set(parents) == PARENTS and found == SETTINGS
except (WorkspaceError, configparser.Error) as error:
    print(error)
Path("/logs/verifier/reward.txt").write_text("1\n" if right else "0\n")
