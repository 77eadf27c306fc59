"""Shapes of models, from config.json and from the table."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("verl")

from verl_tool.trainer.preflight.model_shapes import KNOWN, UnknownShapeError, shape_of


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # What the model hub counts in each model's safetensors files.
        ("Qwen/Qwen2.5-0.5B-Instruct", 494_032_768),
        ("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen2.5-32B", 32_763_876_352),
        ("Qwen/Qwen2.5-72B", 72_706_203_648),
        ("Qwen/Qwen3-30B-A3B", 30_532_122_624),
        ("TIGER-Lab/PixelReasoner-WarmStart", 8_292_166_656),
    ],
)
def test_known_models_have_the_published_number_of_parameters(name, parameters):
    assert shape_of(name).parameters == parameters


def test_layers_and_the_rest_make_the_model():
    shape = shape_of("Qwen/Qwen2.5-7B-Instruct")
    assert shape.layers * shape.layer_parameters + shape.root_parameters == shape.parameters
    assert shape.largest_tensor == shape.vocab * shape.hidden
    # An adapter of rank r for a matrix of n by m has r(n + m) parameters.
    of_layer = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert shape.lora_parameters(32) == 28 * 32 * of_layer


@pytest.mark.parametrize(("tensor_parallel", "values"), [(1, 2 * 28 * 4 * 128), (4, 2 * 28 * 128), (8, 2 * 28 * 128)])
def test_a_cached_head_is_never_split(tensor_parallel, values):
    assert shape_of("Qwen/Qwen2.5-7B-Instruct").kv_values(tensor_parallel) == values


def test_a_mixture_counts_all_experts_and_passes_a_few():
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    assert (shape.experts, shape.active_intermediate, shape.intermediate) == (128, 8 * 768, 768)


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-30B-A3B", "TIGER-Lab/PixelReasoner-WarmStart"]
)
def test_a_config_file_gives_the_same_shape_as_the_table(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(KNOWN[name]))
    from_file, known = shape_of(str(tmp_path)), shape_of(name)
    assert from_file.source == str(tmp_path / "config.json")
    assert from_file.parameters == known.parameters
    assert (from_file.heads, from_file.kv_heads, from_file.vocab) == (known.heads, known.kv_heads, known.vocab)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "config.json of .* is not here"),
        ("{", "cannot be read here"),
        ('{"model_type": "no_such_type"}', "cannot be read here"),
        ('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": "wide"}', "cannot be"),
    ],
)
def test_a_shape_that_cannot_be_had_is_named_with_the_reason(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnknownShapeError, match=problem):
        shape_of(str(tmp_path))


def test_a_name_that_neither_the_cache_nor_the_table_has():
    with pytest.raises(UnknownShapeError, match=r"config\.json of some/model is not here"):
        shape_of("some/model")
