"""Questions about documents that are longer than the context window, as MemAgent trains on (arXiv 2507.02259).

    python examples/data_preprocess/long_document.py --train hotpotqa_train_32k.parquet --test hotpotqa_dev.parquet \\
        --documents data/long_document/documents

A source's row has the columns of BytedTsinghua-SIA/hotpotqa: `prompt` (a message with the question), `context` (the
document) and `reward_model` (`ground_truth`: a list of answers). Documents are written to
``<documents>/<split>-<n>.txt``, with a form feed between pages, for the tool of the recipe; the answer
is for `search_r1_qa_em`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import Limit, LocalDir, Row, RowError, convert, field, load, messages, row, run, save

DATA_SOURCE = "long_document"
HOW_TO_GET = (
    "get MemAgent's by: hf download BytedTsinghua-SIA/hotpotqa hotpotqa_train_32k.parquet hotpotqa_dev.parquet "
    "--repo-type dataset --local-dir data/memagent"
)
READING = """\
Answer a question about a document. The document is longer than what you can remember: read it page by page, to its
end, and note what you need before a page is taken away. Then give a short answer between <answer> and </answer>,
without an explanation: <answer>Beijing</answer>, for example.

Question: """


def split_pages(text: str, page_characters: int) -> Iterator[str]:
    """The text in pages of at most so many characters. A page ends between two paragraphs where that is possible."""
    page = ""
    for paragraph in text.replace("\f", " ").split("\n\n"):
        if page and len(page) + 2 + len(paragraph) > page_characters:
            yield page
            page = ""
        page = f"{page}\n\n{paragraph}" if page else paragraph
        while len(page) > page_characters:
            yield page[:page_characters]
            page = page[page_characters:]
    if page:
        yield page


def as_row(
    source: Mapping[str, Any], split: str, index: int, documents: Path, page_characters: int, instructions: bool
) -> Row:
    """One question; its document is written."""
    asked = field(source, "prompt", index, list)[-1]
    question = field(asked, "content", index)
    answers = field(field(source, "reward_model", index, dict), "ground_truth", index, list)
    pages = list(split_pages(field(source, "context", index), page_characters))
    if not pages:
        raise RowError(f"row {index}: its document is empty")
    name = f"{split}-{index}"
    (documents / f"{name}.txt").write_text("\f".join(pages), encoding="utf-8")
    extra = {"question": question, "pages": len(pages), "tools_kwargs": {"document": name}}
    prompt = messages(None, (READING if instructions else "") + question)
    return row(DATA_SOURCE, prompt, "qa", json.dumps([str(answer) for answer in answers]), split, index, extra)


def main(
    train: Annotated[Path, typer.Option("--train", help="Parquet or JSON lines: rows to train on.")],
    test: Annotated[Path, typer.Option("--test", help="The same, held out.")],
    documents: Annotated[Path, typer.Option("--documents", help="Folder for the documents.")],
    local_dir: LocalDir = Path("data/long_document"),
    page_characters: Annotated[
        int, typer.Option("--page_characters", min=1, help="Most characters of a page; four are about a token.")
    ] = 16_000,
    instructions: Annotated[bool, typer.Option(" /--no_instructions", help="Give the question alone.")] = True,
    limit: Limit = None,
) -> None:
    """Make the data set."""
    for file in (train, test):
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {file}; {HOW_TO_GET}")
    documents.mkdir(parents=True, exist_ok=True)
    make = partial(as_row, documents=documents, page_characters=page_characters, instructions=instructions)
    sources = {"train": load(str(train), limit=limit), "test": load(str(test), limit=limit)}
    save(convert(sources, make), local_dir)


if __name__ == "__main__":
    run(main)
