"""Tool-call formats of instruct models, as their chat templates write them. One file per model family."""

from __future__ import annotations

from verl_tool.formats.native.deepseek import DeepSeekFormat
from verl_tool.formats.native.glm import GlmFormat
from verl_tool.formats.native.harmony import HarmonyFormat
from verl_tool.formats.native.kimi import KimiFormat
from verl_tool.formats.native.llama3 import Llama3Format
from verl_tool.formats.native.mistral import MistralFormat
from verl_tool.formats.native.qwen3_coder import Qwen3CoderFormat
from verl_tool.formats.tool_response import ToolResponseFormat

QWEN3_CODER = Qwen3CoderFormat()
LLAMA3 = Llama3Format()
MISTRAL = MistralFormat()
DEEPSEEK = DeepSeekFormat()
GLM = GlmFormat()
KIMI = KimiFormat()
HARMONY = HarmonyFormat()
NATIVE: tuple[ToolResponseFormat, ...] = (QWEN3_CODER, LLAMA3, MISTRAL, DEEPSEEK, GLM, KIMI, HARMONY)

__all__ = ["DEEPSEEK", "GLM", "HARMONY", "KIMI", "LLAMA3", "MISTRAL", "NATIVE", "QWEN3_CODER"]
