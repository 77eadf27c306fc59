"""Text as models, tools and attackers write it."""

from __future__ import annotations

from hypothesis import strategies as st

from verl_tool.formats import BUILT_IN_MARKERS

PIECES = (
    *sorted(BUILT_IN_MARKERS),
    "```python\n",
    "```output",
    "\n```\n",
    "````md\n",
    "`",
    "``",
    "<",
    "</",
    ">",
    "/>",
    "<request><Tool>",
    "<finish/>",
    '{"name": "a", "arguments": {"code": "x"}}',
    '{"name": "a", ',
    '"',
    "\\",
    "[",
    "}",
    "\n",
    "\r\n",
    " ",
    "print(1)",
    "<|im_end|>",
    "\ud800",
    "\x00",
    "é",
)
"""What the formats look for, and near misses of it."""

texts = st.one_of(
    st.text(max_size=200),
    st.lists(st.sampled_from(PIECES), max_size=25).map("".join),
    st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), max_size=25).map("".join),
)
"""Arbitrary text, most of it full of marks in the wrong places. Holds lone surrogates too."""

plain = st.text(alphabet=st.characters(exclude_characters="<>`", exclude_categories=["Cs"]), max_size=80)
"""Text in which no format has a mark."""
