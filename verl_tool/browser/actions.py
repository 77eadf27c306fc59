"""The actions of a browser, by BrowserGym's names. Each takes a session, and texts and numbers."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from verl_tool.browser.action_syntax import ActionSyntaxError, BrowserAction
from verl_tool.browser.keyboard import hold_key, press_keys, release_key, type_keys
from verl_tool.browser.tab import PageActionError, Tab

if TYPE_CHECKING:
    from verl_tool.browser.browser_session import BrowserSession

MAX_TYPED = 2000
"""Characters that are typed key by key; a longer text is inserted."""
MAX_WAIT_SECONDS = 10.0
_BUTTONS = ("left", "middle", "right")
_MODIFIERS = ("Alt", "Control", "ControlOrMeta", "Meta", "Shift")
_NUMBER = re.compile(r"\[?\s*(?:bid=|e)?(\d{1,9})\s*\]?")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:(?!\d+(/|$))")
_SCROLL_SECONDS = 0.1
_RELEASE_SECONDS = 1.0

_SELECT_TEXT = """function() {
  if (this.disabled || this.readOnly) return "cannot be written to";
  this.focus();
  const picked = ["date", "color", "range", "time", "month", "week", "datetime-local"].includes(this.type);
  if (picked) return {picked: true};
  if (this.isContentEditable) getSelection().selectAllChildren(this);
  else if (typeof this.select === "function") this.select();
  else return "takes no text";
  return {picked: false};
}"""
_SET_VALUE = """function(value) {
  Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, "value").set.call(this, value);
  for (const name of ["input", "change"]) this.dispatchEvent(new Event(name, {bubbles: true}));
  return this.value === "" && value !== "" ? "does not take that value" : true;
}"""
_SELECT_OPTIONS = """function(wanted) {
  if (!(this instanceof HTMLSelectElement)) return "has no options";
  if (this.disabled) return "is disabled";
  const found = wanted.map((each) =>
    [...this.options].find((option) => option.label.trim() === each.trim() || option.value === each));
  const missing = wanted.find((each, i) => !found[i]);
  if (missing !== undefined) return "has no option " + JSON.stringify(missing.slice(0, 80));
  if (found.length > 1 && !this.multiple) return "takes one option only";
  for (const option of this.options) option.selected = found.includes(option);
  for (const name of ["input", "change"]) this.dispatchEvent(new Event(name, {bubbles: true}));
  return true;
}"""
_FOCUS = "function() { this.focus(); return true; }"
_CHECKED = """function() {
  return typeof this.checked === "boolean" ? {on: this.checked} : {on: this.getAttribute("aria-checked") === "true"};
}"""

Action = Callable[..., Awaitable[None]]
Button = Literal["left", "middle", "right"]


class Element(int):
    """The number of an element."""


async def noop(session: BrowserSession, wait_ms: float = 1000) -> None:
    await session.tab.settle(min(max(wait_ms, 0) / 1000, MAX_WAIT_SECONDS))


async def click(session: BrowserSession, bid: Element, button: str = "left", modifiers: Sequence[str] = ()) -> None:
    await _click(session, bid, button, modifiers, 1)


async def dblclick(session: BrowserSession, bid: Element, button: str = "left", modifiers: Sequence[str] = ()) -> None:
    await _click(session, bid, button, modifiers, 2)


async def hover(session: BrowserSession, bid: Element) -> None:
    await session.tab.page.mouse.move(*await session.tab.locate(bid, enabled=False))


async def fill(session: BrowserSession, bid: Element, value: str) -> None:
    found = await session.tab.call(bid, _SELECT_TEXT)
    if found["picked"]:
        await session.tab.call(bid, _SET_VALUE, value)
    elif value:
        await session.tab.page.keyboard.insert_text(value)
    else:
        await press_keys(session.tab, "Delete")


async def clear(session: BrowserSession, bid: Element) -> None:
    await fill(session, bid, "")


async def type_text(session: BrowserSession, bid: Element, text: str, press_enter: bool = False) -> None:
    await click(session, bid)
    await keyboard_type(session, text)
    if press_enter:
        await press_keys(session.tab, "Enter")


async def focus(session: BrowserSession, bid: Element) -> None:
    await session.tab.call(bid, _FOCUS)


async def press(session: BrowserSession, bid: Element, key_comb: str) -> None:
    await session.tab.call(bid, _FOCUS)
    await press_keys(session.tab, key_comb)


async def select_option(session: BrowserSession, bid: Element, options: Sequence[str] | str) -> None:
    await session.tab.call(bid, _SELECT_OPTIONS, [options] if isinstance(options, str) else list(options))


async def check(session: BrowserSession, bid: Element) -> None:
    await _set_checked(session, bid, True)


async def uncheck(session: BrowserSession, bid: Element) -> None:
    await _set_checked(session, bid, False)


async def drag_and_drop(session: BrowserSession, from_bid: Element, to_bid: Element) -> None:
    target = await session.tab.locate(to_bid, enabled=False)
    source = await session.tab.locate(from_bid, enabled=False)
    target = await session.tab.locate(to_bid, enabled=False) if source == target else target
    await mouse_drag_and_drop(session, *source, *target)


async def upload_file(session: BrowserSession, bid: Element, file: str = "") -> None:
    raise PageActionError("files cannot be uploaded here")


async def scroll(session: BrowserSession, delta_x: float, delta_y: float) -> None:
    await session.tab.page.mouse.wheel(delta_x, delta_y)
    await session.tab.settle(_SCROLL_SECONDS)


async def scroll_page(session: BrowserSession, pages: float = 1.0) -> None:
    await scroll(session, 0, pages * session.height)


async def mouse_move(session: BrowserSession, x: float, y: float) -> None:
    await session.tab.page.mouse.move(x, y)


async def mouse_down(session: BrowserSession, x: float, y: float, button: str = "left") -> None:
    await session.tab.page.mouse.move(x, y)
    session.tab.may_hold_input = True
    await session.tab.page.mouse.down(button=_button(button))


async def mouse_up(session: BrowserSession, x: float, y: float, button: str = "left") -> None:
    await session.tab.page.mouse.move(x, y)
    await session.tab.page.mouse.up(button=_button(button))


async def mouse_click(session: BrowserSession, x: float, y: float, button: str = "left") -> None:
    await session.tab.page.mouse.click(x, y, button=_button(button))


async def mouse_dblclick(session: BrowserSession, x: float, y: float, button: str = "left") -> None:
    await session.tab.page.mouse.dblclick(x, y, button=_button(button))


async def mouse_drag_and_drop(session: BrowserSession, from_x: float, from_y: float, to_x: float, to_y: float) -> None:
    mouse = session.tab.page.mouse
    await mouse.move(from_x, from_y)
    await mouse.down()
    await mouse.move(to_x, to_y, steps=5)
    await mouse.up()


async def keyboard_press(session: BrowserSession, key: str) -> None:
    await press_keys(session.tab, key)


async def keyboard_down(session: BrowserSession, key: str) -> None:
    session.tab.may_hold_input = True
    await hold_key(session.tab, key)


async def keyboard_up(session: BrowserSession, key: str) -> None:
    await release_key(session.tab, key)


async def keyboard_type(session: BrowserSession, text: str) -> None:
    await type_keys(session.tab, text) if len(text) <= MAX_TYPED else await keyboard_insert_text(session, text)


async def keyboard_insert_text(session: BrowserSession, text: str) -> None:
    await session.tab.page.keyboard.insert_text(text)


async def goto(session: BrowserSession, url: str) -> None:
    await session.navigate(validate_address(url))


async def go_back(session: BrowserSession) -> None:
    if await session.tab.page.go_back(wait_until="commit") is None:
        raise PageActionError("there is no page to go back to")


async def go_forward(session: BrowserSession) -> None:
    if await session.tab.page.go_forward(wait_until="commit") is None:
        raise PageActionError("there is no page to go forward to")


async def new_tab(session: BrowserSession, url: str = "") -> None:
    address = validate_address(url) if url else ""
    await session.new_tab()
    if address:
        await session.navigate(address)


async def tab_close(session: BrowserSession, index: int | None = None) -> None:
    await session.close_tab(index)


async def tab_focus(session: BrowserSession, index: int) -> None:
    await session.switch_tab(index)


async def screenshot(session: BrowserSession) -> None:
    session.wants_image = True


async def send_msg_to_user(session: BrowserSession, text: str) -> None:
    session.finish(text)


async def report_infeasible(session: BrowserSession, reason: str = "") -> None:
    session.finish(reason)


ACTIONS: dict[str, Action] = {
    each.__name__: each
    for each in (
        *(noop, click, dblclick, hover, fill, clear, focus, press, select_option, check, uncheck, drag_and_drop),
        *(upload_file, scroll, scroll_page, mouse_move, mouse_down, mouse_up, mouse_click, mouse_dblclick),
        *(mouse_drag_and_drop, keyboard_press, keyboard_down, keyboard_up, keyboard_type, keyboard_insert_text),
        *(goto, go_back, go_forward, new_tab, tab_close, tab_focus, screenshot, send_msg_to_user, report_infeasible),
    )
}
ACTIONS |= {"type": type_text, "open": goto, "back": go_back, "forward": go_forward, "select": select_option}
ACTIONS |= {"switch_tab": tab_focus, "close_tab": tab_close, "stop": send_msg_to_user, "wait": noop}
_SAME = {
    **{"id": "bid", "element": "bid", "element_id": "bid", "key": "key_comb"},
    **{"value": "options", "option": "options", "text": "value"},
}
"""Names of arguments that other action sets have."""


def bind(action: BrowserAction) -> tuple[Action, dict[str, Any]]:
    """Return the function of an action, and its arguments. Raises ActionSyntaxError, which names what there is."""
    function = ACTIONS.get(action.name)
    if function is None:
        raise ActionSyntaxError(f"{action.name[:40]!r} is no action; there are {', '.join(ACTIONS)}")
    signature = inspect.signature(function, eval_str=True, locals={"BrowserSession": object})
    names = list(signature.parameters)[1:]
    keywords = {name if name in names else _SAME.get(name, name): value for name, value in action.keywords.items()}
    try:
        bound = signature.bind(None, *action.arguments, **keywords)
    except TypeError:
        raise ActionSyntaxError(f"write {action.name}({', '.join(names)})") from None
    arguments = {}
    for name, value in list(bound.arguments.items())[1:]:
        arguments[name] = _convert(action.name, name, value, signature.parameters[name].annotation)
    return function, arguments


def validate_address(url: str) -> str:
    """Return an address to open. Raises ActionSyntaxError for one that is not of the web."""
    url = url.strip()
    if not _SCHEME.match(url) and url:
        url = f"https://{url}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        usable = False
    if not usable and url != "about:blank":
        raise ActionSyntaxError(f"{url[:100]!r} cannot be opened; only addresses that begin with http or https can")
    return url


def _convert(action: str, name: str, value: object, kind: object) -> Any:
    if kind is Element:
        found = _NUMBER.fullmatch(str(value).strip())
        if found is None:
            raise ActionSyntaxError(f'{action}: {str(value)[:40]!r} is no element; give its number, such as "12"')
        return int(found[1])
    if kind in (str, "str") and isinstance(value, (str, int, float)):
        return str(value)
    if kind is bool and str(value).lower() in ("0", "1", "true", "false"):
        return str(value).lower() in ("1", "true")
    if kind in (int, float, int | None):
        try:
            number = float(str(value))
        except ValueError:
            number = float("nan")
        if abs(number) < 1e9:
            return number if kind is float else int(number)
    texts = [value] if isinstance(value, str) else value
    if not isinstance(kind, type) and isinstance(texts, (list, tuple)) and all(isinstance(t, str) for t in texts):
        return list(texts)
    raise ActionSyntaxError(f"{action}: {name} cannot be {str(value)[:40]!r}")


async def _click(session: BrowserSession, bid: Element, button: str, modifiers: Sequence[str], count: int) -> None:
    unknown = [each for each in modifiers if each not in _MODIFIERS]
    if unknown:
        raise PageActionError(f"{unknown[0][:40]!r} is no modifier; there are {', '.join(_MODIFIERS)}")
    page = session.tab.page
    x, y = await session.tab.locate(bid)
    for key in modifiers:
        await hold_key(session.tab, key)
    try:
        await page.mouse.click(x, y, button=_button(button), click_count=count)
    finally:
        # A page that hangs does not answer, and the step's deadline may have passed.
        with contextlib.suppress(Exception):
            await asyncio.wait_for(_release_keys(session.tab, modifiers), _RELEASE_SECONDS)


async def _release_keys(tab: Tab, keys: Sequence[str]) -> None:
    tab.may_hold_input, before = True, tab.may_hold_input
    for key in keys:
        await release_key(tab, key)
    tab.may_hold_input = before


def _button(name: str) -> Button:
    if name not in _BUTTONS:
        raise PageActionError(f"{name[:40]!r} is no button; there are {', '.join(_BUTTONS)}")
    return name  # type: ignore[return-value] # as just checked


async def _set_checked(session: BrowserSession, bid: Element, on: bool) -> None:
    if (await session.tab.call(bid, _CHECKED))["on"] != on:
        await click(session, bid)
