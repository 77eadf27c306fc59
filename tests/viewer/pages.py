"""What tests do with the viewer's pages in a browser."""

from __future__ import annotations

import time


def run(browser, script, *arguments):
    return browser.execute_script(script, *arguments)


def wait(browser, condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not run(browser, f"return Boolean({condition})"):
        assert time.monotonic() < until, f"never true: {condition}\n{text(browser)[:300]}"
        time.sleep(0.03)


def text(browser, selector="body"):
    return run(browser, "return document.querySelector(arguments[0])?.innerText ?? ''", selector)


def press(browser, key):
    run(browser, "document.body.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}))", key)


def fits(browser):
    """The page is not wider than the window."""
    return run(browser, "return document.documentElement.scrollWidth <= innerWidth")


def set_window(browser, width, height, scheme):
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


SIZES = {"": (1280, 850, "light"), "_dark": (1920, 1000, "dark"), "_phone": (390, 800, "light")}
"""Windows that each view must fit, by the ends of their screenshots' names."""


def complaints(browser):
    """What scripts have said to the console."""
    return [entry for entry in browser.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
