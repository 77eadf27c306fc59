"""A document, page by page: the tool of the recipe.

    python -m verl_tool.servers.ray_serve --embedded --tool_type examples/train/long_document/read.py \
        --tool_config '{"tools": [{"name": "examples/train/long_document/read.py", "folder": "documents"}]}'

A row names its document in ``extra_info.tools_kwargs.document``. It is a text file with a form feed between pages,
``<document>.txt`` in the tool's `folder`.
"""

from pydantic import DirectoryPath

from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind
from verl_tool.servers.tools import Context, ToolOptions, TrajectoryTools, tool
from verl_tool.util.confined_files import read_confined

PAGE_BREAK = "\f"
MAX_BYTES = 64 * 2**20
"""One document."""


class ReadOptions(ToolOptions):
    """Where the documents are."""

    folder: DirectoryPath


class Reader(TrajectoryTools):
    """Where a trajectory is in its document."""

    max_live = 10_000
    Options = ReadOptions
    options: ReadOptions

    async def setup(self, trajectory: Context) -> None:
        name, folder = str(trajectory.extra.get("document") or ""), self.options.folder
        try:
            text = read_confined(folder / f"{name}.txt", folder, MAX_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            words = f"the document {name!r} of the row's tools_kwargs cannot be read from {folder}: {error}"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False) from error
        self._pages, self._number = text.split(PAGE_BREAK), 0

    async def fork(self) -> "Reader":
        copy = Reader.__new__(Reader)
        copy.__dict__ |= self.__dict__
        return copy

    @tool
    async def read(self) -> str:
        """Read the next page of the document."""
        if self._number == len(self._pages):
            return "There are no more pages."
        self._number += 1
        return f"This is page {self._number} of {len(self._pages)}.\n{self._pages[self._number - 1]}"
