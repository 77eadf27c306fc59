"""Embedders: the one in its wheel, against its own package; sentence-transformers where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from verl_tool.retrieval.embedder import DEFAULT, _prompts, load_embedder, probe
from verl_tool.retrieval.passage import RetrievalError

pytestmark = pytest.mark.slow

TEXTS = ["Who painted the harbour of Sandmouth?", "", "amber", "salt and wool " * 50]
# The package looks for its tokenizer on the network unless its file is named.
ITS_OWN = """
import json, sys
from pathlib import Path
import wordllama
folder = Path(wordllama.__file__).parent
tokenizer = wordllama.WordLlama.load_tokenizer(folder / "tokenizers" / "l2_supercat_tokenizer_config.json")
from safetensors import safe_open
with safe_open(folder / "weights" / "l2_supercat_256.safetensors", framework="np") as file:
    model = wordllama.WordLlamaInference(file.get_tensor("embedding.weight"), tokenizer)
print(json.dumps(model.embed(json.loads(sys.argv[1]), norm=True).tolist()))
"""


def test_wordllama_gives_the_vectors_of_its_package() -> None:
    texts = [text for text in TEXTS if text]
    run = subprocess.run(
        [sys.executable, "-c", ITS_OWN, json.dumps(texts)], capture_output=True, text=True, check=True, timeout=60
    )
    ours = load_embedder(DEFAULT)
    assert ours.dimensions == 256
    np.testing.assert_allclose(ours.passages(texts), json.loads(run.stdout), atol=1e-5)


def test_vectors_have_length_one_and_do_not_depend_on_their_neighbours() -> None:
    model = load_embedder(DEFAULT)
    together = model.passages(TEXTS * 40)
    assert together.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), [1, 0, 1, 1] * 40, atol=1e-5)
    for place, text in enumerate(TEXTS):
        np.testing.assert_allclose(model.queries([text])[0], together[place], atol=1e-6)
    assert probe(model) == probe(load_embedder(DEFAULT))


def test_likeness_of_meaning_counts() -> None:
    model = load_embedder(DEFAULT)
    query = model.queries(["a ship in the port"])[0]
    near, far = model.passages(["boats at the harbour", "the theory of numbers"])
    assert query @ near > query @ far


@pytest.mark.parametrize(
    ("name", "own", "wanted"),
    [
        ("intfloat/e5-base-v2", {}, ("query: ", "passage: ")),
        ("/models/e5-base-v2/", {"query": "", "document": ""}, ("query: ", "passage: ")),
        ("BAAI/bge-base-en-v1.5", {}, ("Represent this sentence for searching relevant passages: ", "")),
        ("BAAI/bge-m3", {}, ("", "")),
        ("all-MiniLM-L6-v2", {}, ("", "")),
        ("own", {"query": "ask: ", "document": "doc: "}, ("ask: ", "doc: ")),
    ],
)
def test_queries_and_passages_begin_as_the_model_was_trained(
    name: str, own: dict[str, str], wanted: tuple[str, str]
) -> None:
    assert _prompts(name, own) == wanted


def test_a_model_of_sentence_transformers_is_loaded_from_its_folder(tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = {word: place for place, word in enumerate(["[PAD]", "[UNK]", "amber", "salt", "wool"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    size = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=len(words), **size)).save_pretrained(tmp_path)
    model = load_embedder(str(tmp_path))
    assert model.dimensions == 8
    theirs = library.SentenceTransformer(str(tmp_path)).encode(["amber salt", "wool"], normalize_embeddings=True)
    np.testing.assert_allclose(model.passages(["amber salt", "wool"]), theirs, atol=1e-5)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(RetrievalError, match=r"'e5' needs sentence-transformers .* or use --embedder wordllama"):
        load_embedder("e5")
