"""``python -m verl_tool.retrieval``: build an index, serve it, check its files.

python -m verl_tool.retrieval build --corpus wiki.jsonl --index wiki --kind hybrid
python -m verl_tool.retrieval serve --index wiki
python -m verl_tool.retrieval check --index wiki
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from verl_tool.errors import VerlToolError
from verl_tool.retrieval import index_builder
from verl_tool.retrieval.corpus import Corpus
from verl_tool.retrieval.dense_index import DenseKind
from verl_tool.retrieval.embedder import DEFAULT
from verl_tool.retrieval.index_builder import OnProgress
from verl_tool.retrieval.manifest import BuildSettings, Kind, Manifest
from verl_tool.retrieval.serving.retrieval_cli import serve

console = Console(stderr=True)
app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Search a corpus.")

app.command()(serve)
IndexFolder = Annotated[Path, typer.Option("--index", help="Folder of the index.")]


@app.command()
def build(
    corpus: Annotated[
        Path,
        typer.Option("--corpus", help="JSON lines (.jsonl, .jsonl.gz), .parquet, or a folder of them or of texts."),
    ],
    index: IndexFolder,
    kind: Annotated[Kind, typer.Option("--kind", help="By words, by vectors, or by both.")] = Kind.bm25,
    embedder: Annotated[
        str,
        typer.Option("--embedder", help="For dense and hybrid: wordllama, or a sentence-transformers name or folder."),
    ] = DEFAULT,
    dense: Annotated[
        DenseKind, typer.Option("--dense", help="For dense and hybrid: all vectors, or an approximate index of faiss.")
    ] = DenseKind.flat,
) -> None:
    """Build an index; one that was stopped goes on where it was."""
    with _report_errors(), _bars() as on_progress:
        settings = BuildSettings(
            corpus=str(corpus.resolve()),
            corpus_fingerprint=Corpus(corpus.resolve()).fingerprint,
            kind=kind,
            # What has no part in the index does not tell it from another one.
            embedder=embedder if kind.by_vectors else DEFAULT,
            dense=dense if kind.by_vectors else DenseKind.flat,
        )
        manifest = index_builder.build(settings, index, on_progress)
    size = sum(record.bytes for record in manifest.files.values())
    line = f"{index}: {manifest.passages} passages, {size / 1e6:.1f} MB, {kind.value}"
    console.print(line, highlight=False, soft_wrap=True)


@app.command()
def check(index: IndexFolder) -> None:
    """Read all files of an index and compare them with its manifest."""
    with _report_errors(), _bars() as on_progress:
        manifest = Manifest.load(index)
        manifest.verify(index, lambda share: on_progress(index_builder.HASHING, share))
    line = f"{index}: all {len(manifest.files)} files are as they were built"
    console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _report_errors() -> Iterator[None]:
    """An error of ours is one line, and exit code 1."""
    try:
        yield
    except VerlToolError as error:
        console.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def _bars() -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, TaskID] = {}

        def show(stage: str, share: float) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=1.0)
            progress.update(tasks[stage], completed=share)

        yield show


if __name__ == "__main__":
    app(prog_name="python -m verl_tool.retrieval")
