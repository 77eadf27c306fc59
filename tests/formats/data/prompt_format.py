"""A user's format: the call is a line that begins with ``>>``."""

import re

from verl_tool.formats import Call, escape_markers


class PromptFormat:
    name = "prompt"
    stop = (">>>>",)
    observation = ("<<<<", ">>>>")

    def markers(self):
        return (">>>>", "<<<<", "calc>>")

    def find_calls(self, text):
        found = re.finditer(r"^>> (\w+) (.*)$", text, re.MULTILINE)
        return [Call(match[1], match[2], match.start(), match.end(), self) for match in found]

    def render(self, output, call=None):
        return f"\n<<<<{escape_markers(output)}>>>>\n"

    def usage(self, tools):
        return "Begin a line with >> and a tool's name."


FORMAT = PromptFormat()
