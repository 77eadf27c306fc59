"""The keys of one tab, without the clipboard: chromium has one for all contexts.

Pages may write to the clipboard, but nothing pastes: chromium is started without pasting by the middle button, and
the shortcuts are refused here.
"""

from __future__ import annotations

import re

from verl_tool.browser.tab import PageActionError, Tab

_TOKEN = re.compile(r"(.[^+]*)(?:\+|$)", re.DOTALL)
"""A key of a combination, split as Playwright does it: ``Control++`` has the key ``+``."""
_MODIFIER = re.compile(r"(Control|Shift)(Left|Right|OrMeta)?")
_SHORTCUTS = {
    "Control": {"c", "v", "x", "insert", "numpad0"},
    "Shift": {"insert", "numpad0", "delete", "numpaddecimal"},
}
"""Keys that copy, cut or paste while a modifier is down."""


async def press_keys(tab: Tab, combination: str) -> None:
    """Press keys such as ``Control+a``. Raises PageActionError for a shortcut of the clipboard."""
    keys = _TOKEN.findall(combination)
    before = set(tab.modifiers)
    _check_keys(tab, keys)
    # If it fails halfway, they stay down.
    tab.modifiers.update(_find_modifiers(keys))
    await tab.page.keyboard.press(combination)
    tab.modifiers = before


async def hold_key(tab: Tab, key: str) -> None:
    """Raises PageActionError for a shortcut of the clipboard."""
    _check_keys(tab, [key])
    tab.modifiers.update(_find_modifiers([key]))
    await tab.page.keyboard.down(key)


async def release_key(tab: Tab, key: str) -> None:
    """Release a key that `hold_key` holds down."""
    await tab.page.keyboard.up(key)
    tab.modifiers.difference_update(_find_modifiers([key]))


async def type_keys(tab: Tab, text: str) -> None:
    """Type a text. Raises PageActionError if keys that are down make shortcuts of the clipboard of it."""
    _check_keys(tab, text)
    await tab.page.keyboard.type(text)


def _find_modifiers(keys: list[str]) -> set[str]:
    return {match[1] for key in keys if (match := _MODIFIER.fullmatch(key))}


def _check_keys(tab: Tab, keys: list[str] | str) -> None:
    names = {key.lower().removeprefix("key") for key in keys}
    down = tab.modifiers | _find_modifiers(list(keys))
    if any(names & _SHORTCUTS.get(modifier, set()) for modifier in down):
        raise PageActionError("the clipboard cannot be used here; write the text with fill")
