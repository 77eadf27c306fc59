"""The Python cells of a workspace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from verl_tool.sandbox import CellResult
from verl_tool.sandbox.backends import WorkspaceSandbox
from verl_tool.servers.tools.workspace import kernel
from verl_tool.servers.tools.workspace.cells import Cell

MAX_FIGURE_BYTES = 2 << 20
"""Of one PNG; a larger one is not passed on."""
_FIGURE_SECONDS = 20.0
_PNG = b"\x89PNG\r\n\x1a\n"
_PREPARE = "get_ipython().prepare_figures()"
_SAVED = "print(get_ipython().saved_figures())"


class Notebook:
    """Runs cells, with IPython's names where they are used, and takes the figures that they leave."""

    def __init__(self, session: WorkspaceSandbox) -> None:
        self._session = session
        self._installed = False
        self._draws = False
        """Whether a cell has named matplotlib: a function of it may draw in any later one."""

    def copy_for(self, session: WorkspaceSandbox) -> Notebook:
        """That of a fork: the same names are installed in it."""
        copy = Notebook(session)
        copy._installed, copy._draws = self._installed, self._draws
        return copy

    async def close(self) -> None:
        """All that it holds is the session's."""

    async def run(self, cell: Cell, *, stdin: str, wall_seconds: float, pre_import: Sequence[str]) -> CellResult:
        """Run a cell. Raises as `Session.run`."""
        if cell.needs_kernel and not self._installed:
            installed = await self._session.run(_installer(tuple(pre_import)), wall_seconds=wall_seconds, counted=False)
            if not installed.ok:
                return installed
            self._installed = True
        if cell.draws and not self._draws:
            self._draws = True
            # Apart: it takes its time once, and what it says of fonts is not the cell's.
            await self._session.run(_PREPARE, wall_seconds=_FIGURE_SECONDS, counted=False)
        result = await self._session.run(cell.code, stdin=stdin, interactive=True, wall_seconds=wall_seconds)
        if result.state == "lost":
            self._installed = self._draws = False
        return result

    async def figures(self, most: int) -> tuple[int, dict[int, bytes]]:
        """How many figures the cells have left since the last time, and by their numbers the first `most` of them as
        PNGs, as far as they can be had. Raises as `Session.run`."""
        if not (self._draws and self._installed):
            return 0, {}
        saved = await self._session.run(_SAVED, wall_seconds=_FIGURE_SECONDS, counted=False)
        printed = saved.stdout.strip()
        count = int(printed) if printed.isascii() and printed.isdigit() and len(printed) < 6 else 0
        found = {number: await self._figure(number) for number in range(min(count, most))}
        return count, {number: content for number, content in found.items() if content is not None}

    async def _figure(self, number: int) -> bytes | None:
        try:
            content = await self._session.read_file(f"{kernel.FIGURES}/{number}.png")
        except OSError:
            return None
        return content if content.startswith(_PNG) and len(content) <= MAX_FIGURE_BYTES else None


@cache
def _installer(pre_import: tuple[str, ...]) -> str:
    """A cell that installs `kernel`, in a module of its own."""
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    return f"""\
def _install():
    import sys, types
    module = types.ModuleType("verl_tool_kernel")
    module.__file__ = "<kernel>"
    exec(compile({source!r}, "<kernel>", "exec", dont_inherit=True), module.__dict__)
    module.install(sys.modules["__main__"], {pre_import!r})
_install()
del _install
"""
