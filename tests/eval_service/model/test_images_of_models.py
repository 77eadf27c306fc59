"""Which models read images in the endpoint, by what is in their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import transformers
from looking_model import make_config, make_image_processor, make_tokenizer, two_colours

from eval_service.model.images import image_reading
from eval_service.settings import CompletionsSettings, ServiceSettings
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.verl.image_reading import UNKNOWN
from verl_tool.errors import ConfigError

TOKENIZER = make_tokenizer()


def reading(folder: Path, config: Any, **settings: Any) -> Any:
    config.save_pretrained(folder)
    options = EpisodeOptions(enable_agent=False)
    service = ServiceSettings(model=str(folder), served_model_name="m", options=options, **settings)
    return image_reading(service, HFTokenizer(TOKENIZER))


def test_a_model_of_qwen_s_reads_them_by_the_sizes_in_its_folder(tmp_path: Path) -> None:
    make_image_processor().save_pretrained(tmp_path)
    images, why = reading(tmp_path, make_config(TOKENIZER))
    assert why == ""
    assert images.of(two_colours("red", "blue")) == TOKENIZER.encode(
        "<|vision_start|>" + "<|image_pad|>" * 4 + "<|vision_end|>"
    )


def test_one_that_does_not_say_how_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"put the model's preprocessor_config\.json there"):
        reading(tmp_path, make_config(TOKENIZER))


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (transformers.Qwen3Config(), {}, "reads text only"),
        (transformers.LlavaConfig(), {}, "is of the family llava, whose images are not read here (known are qwen2_vl"),
        (
            make_config(TOKENIZER),
            {"engine": CompletionsSettings(url="http://x")},
            "is on a server that is asked with token ids only (--engine_url)",
        ),
    ],
)
def test_others_say_what_they_do_in_place_of_it(
    tmp_path: Path, config: Any, settings: dict[str, Any], words: str
) -> None:
    images, why = reading(tmp_path, config, **settings)
    assert images is None
    assert why.startswith(words)


def test_a_model_that_cannot_be_read_is_left_to_the_engine_to_tell(tmp_path: Path) -> None:
    options = EpisodeOptions(enable_agent=False)
    settings = ServiceSettings(model=str(tmp_path / "none"), served_model_name="m", options=options)
    assert image_reading(settings, HFTokenizer(TOKENIZER)) == (None, UNKNOWN)
