"""What turns texts into vectors.

``wordllama`` is the default: its weights are in its wheel, and it needs numpy alone. Any other name is a model of
sentence-transformers, by its name or folder.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from verl_tool.retrieval.passage import RetrievalError

DEFAULT = "wordllama"
_PROBE = "What is the capital of France?"
_PROBE_VALUES = 8
_TEXTS_AT_A_TIME = 128
_WEIGHTS, _TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"
_BGE = "Represent this sentence for searching relevant passages: "


class Embedder(Protocol):
    """One model. Its vectors have length 1, so that their inner product is the cosine."""

    dimensions: int

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of passages, ``[texts, dimensions]``."""

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of queries, ``[texts, dimensions]``."""


def load_embedder(name: str) -> Embedder:
    """``wordllama``, or a model of sentence-transformers by its name or folder. Raises RetrievalError."""
    return WordLlama() if name == DEFAULT else SentenceTransformers(name)


def probe(embedder: Embedder) -> list[float]:
    """A few numbers by which another model, or another version of it, is told from this one."""
    return [float(value) for value in embedder.queries([_PROBE])[0, :_PROBE_VALUES]]


class WordLlama:
    """The mean of the vectors of a text's tokens: the model of the package ``wordllama``, read from its files.

    The package itself is not imported: it sets up logging for the whole process, and looks for its tokenizer on the
    network.
    """

    def __init__(self) -> None:
        """Raises RetrievalError if the package is not installed."""
        found = importlib.util.find_spec("wordllama")
        if found is None or not found.submodule_search_locations:
            raise RetrievalError("the embedder 'wordllama' is not installed: install verl-tool[retrieval]")
        from safetensors import safe_open
        from tokenizers import Tokenizer

        folder = Path(found.submodule_search_locations[0])
        try:
            with safe_open(folder / _WEIGHTS, framework="np") as file:
                self._vectors: NDArray[np.float32] = file.get_tensor("embedding.weight").astype(np.float32)
            self._tokenizer = Tokenizer.from_file(str(folder / _TOKENIZER))
        except OSError as error:
            raise RetrievalError(f"the wheel of wordllama holds no {error}; install wordllama 0.4") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.dimensions = self._vectors.shape[1]

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.concatenate(
            [self._embed(texts[i : i + _TEXTS_AT_A_TIME]) for i in range(0, len(texts), _TEXTS_AT_A_TIME)]
        )

    queries = passages

    def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        tokens = [found.ids for found in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in tokens])
        sums = np.zeros((len(texts), self.dimensions), np.float32)
        if lengths.any():
            flat = self._vectors[np.concatenate([ids for ids in tokens if ids])]
            starts = np.cumsum(lengths) - lengths
            sums[lengths > 0] = np.add.reduceat(flat, starts[lengths > 0])
        return _of_length_one(sums)


class SentenceTransformers:
    """A model of sentence-transformers, on a GPU if there is one.

    Queries and passages begin as the model was trained: with the prompts that it brings, or those of E5 and BGE.
    """

    def __init__(self, name: str) -> None:
        """Raises RetrievalError if the library or the model is not there."""
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise RetrievalError(
                f"the embedder {name!r} needs sentence-transformers ({error}): pip install sentence-transformers, or "
                f"use --embedder {DEFAULT}"
            ) from error
        try:
            self._model: Any = SentenceTransformer(name)
        except (OSError, ValueError) as error:
            raise RetrievalError(f"the embedder {name!r} cannot be loaded: {error}") from error
        self._query, self._passage = _prompts(name, self._model.prompts)
        self.dimensions = self.queries([_PROBE]).shape[1]

    def passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._embed(texts, self._passage)

    def queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._embed(texts, self._query)

    def _embed(self, texts: Sequence[str], prompt: str) -> NDArray[np.float32]:
        vectors = self._model.encode(list(texts), prompt=prompt, convert_to_numpy=True, show_progress_bar=False)
        return _of_length_one(np.asarray(vectors, np.float32))


def _prompts(name: str, own: dict[str, str]) -> tuple[str, str]:
    """What a query and a passage begin with."""
    if own.get("query"):
        return own["query"], own.get("passage") or own.get("document") or ""
    known = os.path.basename(name.rstrip("/")).lower()
    if "e5" in known:
        return "query: ", "passage: "
    return (_BGE, "") if "bge" in known and "m3" not in known else ("", "")


def _of_length_one(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Vectors that are zero stay so: a text without tokens is like no other."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.ascontiguousarray(vectors / np.where(lengths > 0, lengths, 1), np.float32)
