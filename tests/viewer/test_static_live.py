"""The live page in a real browser, with a real endpoint and a real tool behind it."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from base64 import b64encode
from io import BytesIO
from pathlib import Path

import pytest
from live_endpoint import CALL, MODEL, calculates, live_endpoint
from made_run import HOSTILE
from pages import SIZES, complaints, fits, run, set_window, text, wait
from PIL import Image
from stand_in import begin, event, stand_in
from viewer_server import in_a_thread, viewer

from verl_tool.viewer.endpoint_proxy import EndpointProxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SHOTS = os.environ.get("VERL_TOOL_SCREENSHOTS")
"""As in `test_static_views`."""


@pytest.fixture
def talk(browser, tmp_path):
    """Opens the live page for a model that follows a rule, or an endpoint that says what `chat` does; at the end no
    script has complained."""
    browser.get("about:blank")
    opened = []

    def open_page(rule=calculates, chat=None, **options):
        server = in_a_thread(stand_in(chat) if chat else live_endpoint(rule, **options))
        endpoint = server.__enter__()
        opened.append(server)
        page = viewer(tmp_path, endpoint=EndpointProxy(endpoint if chat else f"{endpoint.url}/v1"))
        browser.get(f"{page.__enter__()}/#/live")
        opened.append(page)
        wait(browser, "document.getElementById('say')")
        return endpoint

    yield open_page
    browser.get("about:blank")
    for one in reversed(opened):
        one.__exit__(None, None, None)
    assert not complaints(browser)


def say(browser, words):
    run(browser, "const box = document.getElementById('say'); box.value = arguments[0]", words)
    enter = "new KeyboardEvent('keydown', {key: 'Enter', bubbles: true, cancelable: true})"
    run(browser, f"document.getElementById('say').dispatchEvent({enter})")


def state(browser):
    return run(browser, "return document.querySelector('.view.live').dataset.state")


def until(browser, wanted):
    wait(browser, f"document.querySelector('.view.live').dataset.state === {wanted!r}")


def segments(browser):
    """Author and text of each segment in sight."""
    told = "[...document.querySelectorAll('.conversation > .segment')].map(s => s.innerText.split('\\n'))"
    return [(lines[0], "\n".join(lines[1:])) for lines in run(browser, f"return {told}")]


def test_an_answer_with_a_call_streams_and_ends_as_the_endpoint_s_record(talk, browser):
    talk(pause=0.02)
    say(browser, "What is 13.1-3?")
    wait(browser, "document.querySelector('.growing')?.innerText.startsWith('<request>')")
    assert state(browser) == "writing"
    assert text(browser, "#send") == "Stop"
    until(browser, "done")
    authors = [author for author, _ in segments(browser)]
    assert authors == ["you", "model, turn 1", "tool", "model, turn 2"]
    assert CALL in segments(browser)[1][1]
    assert segments(browser)[2] == ("tool", "14 tokens\n10.1<response>")
    assert "Result=10.1" in segments(browser)[3][1]
    assert "ended: answered · 1 call" in text(browser, ".end")
    assert "<|im_start|>user" in run(browser, "return document.querySelector('details .segment.prompt').textContent")
    bars = run(browser, "return [...document.querySelectorAll('.waterfall text')].map(bar => bar.textContent)")
    assert [bar.split(",")[0] for bar in bars[0:3:2]] == ["turn 1", "turn 2"]
    assert "SimpleCalculatorTool" in text(browser, "aside .call")
    assert "10.1<response>" in run(browser, "return document.querySelector('aside .call').textContent")


def test_the_model_is_told_what_was_said_before(talk, browser):
    heard = []
    talk(lambda prompt: heard.append(prompt) or f"answer {len(heard)}", options={"action_stop_tokens": ["</no>"]})
    run(browser, "document.getElementById('system').value = 'Be brief.'")
    run(browser, "document.getElementById('system').dispatchEvent(new Event('input'))")
    say(browser, "first question")
    until(browser, "done")
    say(browser, "second question")
    wait(browser, "document.querySelectorAll('.end').length === 2")
    assert heard[1].index("Be brief.") < heard[1].index("first question") < heard[1].index("answer 1")
    assert heard[1].index("answer 1") < heard[1].index("second question")
    run(browser, "document.querySelector('.end button').click()")
    assert "turn 1" in run(browser, "return document.querySelector('.waterfall').textContent")
    run(browser, "document.getElementById('anew').click()")
    assert "Nothing has been said yet." in text(browser, ".conversation")


def test_stop_ends_the_generation_too(talk, browser):
    live = talk(lambda prompt: "word " * 600, pause=0.02)
    say(browser, "go on and on")
    wait(browser, "document.querySelector('.growing')?.innerText.includes('word word')")
    run(browser, "document.getElementById('send').click()")
    until(browser, "stopped")
    assert "what follows does not build on it" in text(browser, ".end")
    assert asyncio.run(becomes(lambda: live.engine.cancelled == 1 and live.engine.running == 0))


async def becomes(condition):
    for _ in range(500):
        if condition():
            return True
        await asyncio.sleep(0.02)
    return False


def test_who_leaves_the_page_stops_the_generation_and_finds_what_was_said(talk, browser):
    live = talk(lambda prompt: "word " * 600, pause=0.02)
    say(browser, "go on and on")
    wait(browser, "document.querySelector('.growing')?.innerText.includes('word word')")
    run(browser, "location.hash = '#/runs'")
    assert asyncio.run(becomes(lambda: live.engine.cancelled == 1))
    wait(browser, "document.getElementById('main').dataset.ready?.startsWith('runs')")
    run(browser, "location.hash = '#/live'")
    wait(browser, "document.getElementById('say')")
    assert segments(browser)[0] == ("you", "go on and on")
    assert state(browser) == "stopped"


def test_hostile_text_of_model_and_user_is_shown_and_not_run(talk, browser):
    talk(lambda prompt: HOSTILE, options={"action_stop_tokens": ["</no>"]})
    say(browser, HOSTILE)
    until(browser, "done")
    for _, words in segments(browser):
        assert "<script>window.taken = 1</script>" in words
        assert "RLO" in words
    assert not run(browser, "return document.querySelector('main script, main img, main svg[onload]')")
    assert not run(browser, "return window.taken")


def test_a_long_turn_shows_its_end_while_it_grows_and_all_of_it_then(talk, browser):
    read = threading.Event()

    async def chat(request):
        response = await begin(request)
        await response.write(event({"content": "x" * 9000 + "its end"}))
        await asyncio.to_thread(read.wait, 20)
        await response.write(event({}, finish_reason="stop"))
        return response

    talk(chat=chat)
    say(browser, "write much")
    wait(browser, "document.querySelector('.growing')?.innerText.startsWith('… ')")
    assert "… 3,007 characters before" in text(browser, ".growing")
    assert text(browser, ".growing").endswith("its end")
    read.set()
    until(browser, "done")
    assert "3,007 more characters" in text(browser, ".segment.model")


def test_images_that_a_tool_shows_are_pictures(talk, browser):
    written = BytesIO()
    Image.new("RGB", (3, 2), "red").save(written, "PNG")
    address = f"data:image/png;base64,{b64encode(written.getvalue()).decode()}"
    parts = [{"type": "text", "text": "here: "}, {"type": "image_url", "image_url": {"url": address}}]

    async def chat(request):
        response = await begin(request)
        await response.write(event({"content": "<look>"}))
        await response.write(event({"tool_calls": [{"index": 0, "function": {"name": "look", "arguments": "{}"}}]}))
        await response.write(event({"tool_messages": [{"role": "tool", "content": parts}]}))
        await response.write(event({"content": "red"}, finish_reason="stop"))
        return response

    talk(chat=chat)
    say(browser, "what is there?")
    until(browser, "done")
    pixel = "document.querySelector('.segment.image canvas')?.getContext('2d').getImageData(0, 0, 1, 1).data"
    wait(browser, f"{pixel}?.slice(0, 3).join() === '255,0,0'")
    assert "look" in text(browser, "aside .call")
    assert [author for author, _ in segments(browser)][-1] == "model, turn 2"


def test_an_answer_that_breaks_off_is_told_and_what_came_of_it_stays(talk, browser):
    async def chat(request):
        response = await begin(request)
        await response.write(event({"content": "half an ans"}))
        return response

    talk(chat=chat)
    say(browser, "tell me")
    until(browser, "failed")
    assert "broke off before its end" in text(browser, ".end .error")
    assert segments(browser)[1] == ("model, turn 1", "half an ans")


def test_an_error_of_the_endpoint_is_told_and_the_question_kept(talk, browser):
    live = talk(max_model_len=200)
    say(browser, "What is 13.1-3? " * 20)
    until(browser, "failed")
    assert "Shorten it" in text(browser, ".end .error")
    assert run(browser, "return document.getElementById('say').value").startswith("What is 13.1-3?")
    live.engine.dead = True
    say(browser, "What is 13.1-3?")
    wait(browser, "document.querySelectorAll('.end .error').length === 2")
    assert "it is dead" in run(browser, "return [...document.querySelectorAll('.end .error')].at(-1).innerText")


def test_an_error_in_the_stream_is_told_and_ends_it(talk, browser):
    left = threading.Event()

    async def chat(request):
        response = await begin(request)
        await response.write(
            event({"content": "<look>"}) + event({"tool_messages": [{"role": "tool", "content": None}]})
        )
        await response.write(b'data: {"error": {"message": "the tool is gone"}}\n\n')
        try:
            await asyncio.sleep(60)
        finally:
            left.set()
        return response

    talk(chat=chat)
    say(browser, "look")
    until(browser, "failed")
    assert text(browser, ".end .error") == "the tool is gone"
    assert left.wait(10)


@pytest.mark.parametrize(
    "trajectory",
    [
        5,
        {"segments": [{"author": "model", "text": 5, "tokens": 3}], "calls": [{"action": 7}], "timings": 5},
    ],
)
def test_a_trajectory_that_is_none_is_told_and_the_next_question_is_answered(talk, browser, trajectory):
    answers = [{"trajectory": trajectory, "finish_reason": "stop"}, {"finish_reason": "stop"}]

    async def chat(request):
        response = await begin(request)
        await response.write(event({"content": "yes"}, **answers.pop(0)))
        return response

    talk(chat=chat)
    say(browser, "first question")
    until(browser, "done")
    assert "what the endpoint sent cannot be drawn" in text(browser, ".conversation > .error")
    say(browser, "second question")
    wait(browser, "document.querySelector('.conversation > .end')?.innerText.includes('ended: stop')")
    assert segments(browser)[-1] == ("model, turn 1", "yes")


def test_without_an_endpoint_the_page_says_how_to_start_one(browser, tmp_path):
    with viewer(tmp_path) as url:
        browser.get(f"{url}/#/live")
        wait(browser, "document.getElementById('main').dataset.ready?.startsWith('live')")
        assert "python -m verl_tool.viewer outputs --endpoint http://127.0.0.1:8000/v1" in text(browser, "main")
        browser.get("about:blank")
    assert not complaints(browser)


def test_an_endpoint_that_does_not_run_is_told(browser, tmp_path):
    with viewer(tmp_path, endpoint=EndpointProxy("http://127.0.0.1:9/v1")) as url:
        browser.get(f"{url}/#/live")
        wait(browser, "document.querySelector('.error')")
        assert "http://127.0.0.1:9/v1 cannot be reached" in text(browser, ".error")
        browser.get("about:blank")
    assert not complaints(browser)


def calculates_the_last(prompt):
    """The rule of a model that calls the calculator once for each question."""
    question = re.findall(r"user\n(.*?)<\|im_end\|>", prompt)[-1]
    _, asked, answer = prompt.rpartition("<|im_start|>assistant\n")[2].rpartition("<call>")
    if asked:
        return f"Result={answer.split('<response>')[0].strip()}"
    return f"<request><SimpleCalculatorTool>{re.search(r'[0-9].*[0-9]', question)[0]}<call>"


def test_the_page_fits_each_window_while_an_answer_streams(talk, browser):
    live = talk(calculates_the_last)
    for name, window in SIZES.items():
        set_window(browser, *window)
        run(browser, "document.getElementById('anew').click()")
        live.engine.pause = 0.0
        say(browser, "What is 13.1-3?")
        until(browser, "done")
        assert fits(browser), name
        live.engine.pause = 0.1
        say(browser, "And what is 7*6.5-3?")
        wait(browser, "document.querySelector('.growing')?.innerText.startsWith('Result=')")
        assert state(browser) == "writing"
        assert fits(browser), name
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            browser.save_screenshot(f"{SHOTS}/viewer_live{name}.png")
        until(browser, "done")
    assert MODEL in text(browser, ".bar")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
