"""The page in a browser: what it shows, what it asks of the server, and whom it lets use it."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from jaxinfer import AsyncLLM, EngineArgs
from jaxinfer.engine_factory import build_engine
from jaxinfer.server.app import build_app
from jaxinfer.server.settings import ServerSettings
from tests.server.browser import LIMIT_MS, chromium, served, tab
from tests.server.scripted_server import scripted_server
from tests.server.story_server import story_server
from tests.tiny_llm import SMALL, ids, oracle_greedy, tiny_llm_dir
from tests.tiny_llm import TOKENIZER as TINY

__all__ = ["chromium"]

HOSTILE = """Hello <img src=x onerror="window.hacked = 1"> and <script>window.hacked = 2</script>

# <b onclick=alert(1)>Heading</b>

[a](javascript:window.hacked=3) [b](data:text/html,x) [c](//evil.example) [d](https://good.example/x?y=1)
![pic](https://good.example/p.png) <https://auto.example/> `<i>code</i>`

| <u>a</u> | b |
|---|---|
| <svg onload=alert(1)> | [e](vbscript:x) |

```html
<iframe src="javascript:alert(1)"></iframe>
```
"""
WIDE = f"""```
{"x" * 300}
```

| {" | ".join("column" + str(i) for i in range(30))} |
|{"---|" * 30}
| {" | ".join("1" * 12 for _ in range(30))} |

{"y" * 200}
"""


def scripted(script, **settings):
    return served(partial(scripted_server, script, settings))


def slow_story(seconds: float = 0.004, **settings):
    """A model that writes on and on, a step at a time, over a pool of 399 blocks of 4 tokens."""

    @asynccontextmanager
    async def make():
        async with story_server(settings, max_model_len=1200) as server:
            tell = server.executor.next_token

            def tell_slowly(context):
                time.sleep(seconds)
                return tell(context)

            server.executor.next_token = tell_slowly
            yield server

    return served(make)


@contextmanager
def story_page(chromium):
    with served(story_server) as server, tab(chromium, server.url) as one:
        yield one


def test_an_answer_streams_and_is_shown_as_markdown(chromium):
    text = "# Title\n\nSome **bold** and `code`:\n\n- one\n- two\n  1. deep\n\n```py\nprint(1)\n```\n\nEnd."
    with scripted(text) as server, tab(chromium, server.url) as one:
        page = one.page
        page.evaluate(
            """() => {
                window.lengths = new Set();
                const note = () => window.lengths.add(document.querySelector(".assistant .text")?.textContent.length);
                new MutationObserver(note).observe(document.getElementById("messages"), { subtree: true, childList: true });
            }"""
        )
        server.server.executor.next_token = slowly(server.server.executor.next_token, 0.003)
        one.ask("Tell me")
        message = one.answer()
        assert page.evaluate("window.lengths.size") > 3
        assert message.locator("h4").inner_text() == "Title"
        assert message.locator("strong").inner_text() == "bold"
        assert message.locator("p > code").inner_text() == "code"
        assert message.locator(".text > ul > li").count() == 2
        assert message.locator("li li").inner_text() == "deep"
        assert message.locator("pre code").inner_text() == "print(1)"
        assert message.locator(".code-head span").inner_text() == "py"
        assert "written" in message.locator(".note").inner_text()
        assert "complete" in page.inner_text("#announcer")
        # The conversation goes on from both.
        asked = []
        page.on("request", lambda r: asked.append(r) if "chat/completions" in r.url else None)
        one.ask("And then?")
        one.answer(1)
        sent = json.loads(asked[0].post_data)
        assert sent["messages"] == [
            {"role": "user", "content": "Tell me"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": "And then?"},
        ]
        page.click(".again >> nth=-1")
        page.wait_for_function(
            "() => document.querySelectorAll('.assistant .buttons').length === 2"
        )
        assert json.loads(asked[1].post_data)["messages"] == sent["messages"]


def slowly(next_token, seconds):
    def wait(context):
        time.sleep(seconds)
        return next_token(context)

    return wait


@asynccontextmanager
async def tiny_model():
    llm = AsyncLLM.from_engine(build_engine(EngineArgs(str(tiny_llm_dir()), **SMALL)))
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    try:
        yield SimpleNamespace(app=build_app(llm, ServerSettings(("tiny",), chat_template=template)))
    finally:
        llm.shutdown()


def test_a_model_answers_as_transformers_says(chromium):
    with served(tiny_model) as server, tab(chromium, server.url) as one:
        one.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        one.page.click("#settings-button")
        one.page.fill("#temperature", "0")
        one.page.fill("#max-tokens", "12")
        one.ask("brown")
        button = one.answer().locator(".buttons button").first
        button.click()
        one.page.wait_for_function(
            "() => document.querySelector('.buttons button').textContent === 'Copied'"
        )
        expected = TINY.decode(oracle_greedy(ids("brown"), 12))
        assert one.page.evaluate("navigator.clipboard.readText()") == expected
        one.page.wait_for_function("() => document.getElementById('n-cached').textContent > 0")
        # That picture may be of the step before the last.
        end = time.monotonic() + LIMIT_MS / 1000
        while (count := one.pictures[-1]["counters"]["generation_tokens"]) < 12:
            assert time.monotonic() < end
            one.page.wait_for_timeout(50)
        assert count == 12


def test_code_is_copied(chromium):
    with scripted("```\na < b\n```") as server, tab(chromium, server.url) as one:
        one.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        one.ask("code")
        one.answer().locator(".copy").click()
        one.page.wait_for_function("() => document.querySelector('.copy').textContent === 'Copied'")
        assert one.page.evaluate("navigator.clipboard.readText()") == "a < b"


def test_hostile_text_stays_text(chromium):
    with scripted(HOSTILE) as server, tab(chromium, server.url) as one:
        asked = []
        one.page.on("request", lambda r: asked.append(r.url))
        one.ask("<img src=y onerror=alert(2)>")
        message = one.answer()
        shown = message.locator(".text").inner_text()
        assert '<img src=x onerror="window.hacked = 1">' in shown
        assert "<script>window.hacked = 2</script>" in shown
        assert "[a](javascript:window.hacked=3) [b](data:text/html,x) [c](//evil.example)" in shown
        assert '<iframe src="javascript:alert(1)"></iframe>' in shown
        forbidden = "img, script, b, svg, iframe, u, i:not([class]), [onclick], [onerror], [onload]"
        assert one.page.locator(f"#messages :is({forbidden})").count() == 0
        links = message.locator("a")
        targets = [links.nth(i).get_attribute("href") for i in range(links.count())]
        assert targets == [
            "https://good.example/x?y=1",
            "https://good.example/p.png",
            "https://auto.example/",
        ]
        assert {links.nth(i).get_attribute("rel") for i in range(3)} == {"noopener noreferrer"}
        assert one.page.evaluate("window.hacked") is None
        assert all(url.startswith(server.url) for url in asked)


SLOW = (
    "[" * 40_000,
    "[](" * 9000,
    "**a " * 9000,
    "_a" * 15_000,
    "`" * 30_000,
    "`a``" * 5000,
    "# " + "#" * 30_000 + "x",
    "|" * 20_000 + "\n" + "|:" * 9000,
    "> " * 5000,
    "- " * 5000,
    "http://" + "." * 30_000,
    "\\" * 20_000,
)


def test_no_text_is_slow_to_show(chromium):
    with story_page(chromium) as one:
        seconds = one.page.evaluate(
            """async (texts) => {
                const { MarkdownView } = await import("./page/markdown.js");
                const node = document.createElement("div");
                return texts.map((text) => {
                    const start = performance.now();
                    new MarkdownView(node).update(text);
                    node.replaceChildren();
                    return (performance.now() - start) / 1000;
                });
            }""",
            list(SLOW),
        )
        assert max(seconds) < 5


def test_a_view_that_grows_ends_as_one_made_at_once(chromium):
    with story_page(chromium) as one:
        same = one.page.evaluate(
            """async (text) => {
                const { MarkdownView } = await import("./page/markdown.js");
                const [grown, whole] = [document.createElement("div"), document.createElement("div")];
                const view = new MarkdownView(grown);
                for (let n = 0; n <= text.length; n++) view.update(text.slice(0, n));
                new MarkdownView(whole).update(text);
                return grown.isEqualNode(whole);
            }""",
            HOSTILE + "\n1. a\n2. b\n\n   c\n\n***\n\n> q\n> r\n" + WIDE[-150:],
        )
        assert same


def test_stop_aborts_the_request(chromium):
    with slow_story() as server, tab(chromium, server.url) as one:
        core = server.server.core
        for stop in (lambda: one.page.press("#message", "Escape"), lambda: one.page.click("#stop")):
            one.ask("once upon")
            number = one.page.locator(".message.assistant").count() - 1
            text = one.page.locator(".message.assistant .text").nth(number)
            one.page.wait_for_function(
                "n => document.querySelectorAll('.assistant .text')[n].textContent.length > 20",
                arg=number,
            )
            assert len(core.scheduler.requests) == 1
            one.page.wait_for_selector("#requests tr.own")
            stop()
            note = one.answer(number).locator(".note").inner_text()
            assert note.startswith("stopped") and len(text.inner_text()) > 20
            end = time.monotonic() + LIMIT_MS / 1000
            while core.scheduler.requests:
                assert time.monotonic() < end
            assert one.page.is_visible("#send") and not one.page.is_visible("#stop")
        assert one.page.evaluate("document.activeElement.id") == "message"


def test_reasoning_is_folded(chromium):
    script = "<think>\nFirst this, then that.\n</think>\n\nThe answer."
    with scripted(script, reasoning_parser="qwen3") as server, tab(chromium, server.url) as one:
        one.ask("why")
        message = one.answer()
        assert message.locator(".text").inner_text() == "The answer."
        assert message.locator("details").get_attribute("open") is None
        assert not message.locator(".thoughts").is_visible()
        message.locator("summary").click()
        assert message.locator(".thoughts").inner_text() == "First this, then that."


def test_errors_are_shown_and_the_question_comes_back(chromium):
    with scripted("fine") as server, tab(chromium, server.url) as one:
        one.page.click("#settings-button")
        one.page.fill("#max-tokens", "999999")
        one.page.fill("#temperature", "0.5")
        one.page.fill("#system", "Be brief.")
        one.ask("hello")
        error = one.answer().locator(".error").inner_text()
        assert "max_completion_tokens is too large: 999999" in error
        assert one.page.input_value("#message") == "hello"
        asked = []
        one.page.on("request", lambda r: asked.append(r) if "chat/completions" in r.url else None)
        one.page.fill("#max-tokens", "20")
        one.page.press("#message", "Enter")
        assert one.answer(1).locator(".text").inner_text() == "fine"
        sent = json.loads(asked[0].post_data)
        assert sent["temperature"] == 0.5 and sent["max_completion_tokens"] == 20
        assert [m["content"] for m in sent["messages"]] == ["Be brief.", "hello"]
        server.server.executor.next_token = lambda context: 1 // 0
        one.ask("again")
        assert "ZeroDivisionError" in one.answer(2).locator(".error").inner_text()
        one.page.wait_for_selector("#engine-state[data-kind=down]")


def test_a_key_is_asked_for_and_kept_in_the_tab(chromium):
    with scripted("fine", api_key=("secret",)) as server, tab(chromium, server.url) as one:
        page = one.page
        page.wait_for_selector("#key-form", state="visible")
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_function("() => document.getElementById('key-error').textContent !== ''")
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-form", state="hidden")
        page.wait_for_selector("#model option", state="attached")
        one.ask("hi")
        assert one.answer().locator(".text").inner_text() == "fine"
        page.wait_for_selector("#engine-state[data-kind=idle]")
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.reload()
        page.wait_for_selector("#forget-key", state="visible")
        page.click("#forget-key")
        page.wait_for_selector("#key-form", state="visible")
        assert page.evaluate("sessionStorage.length") == 0


CELLS = """async () => {
    const { gridLayout } = await import("./page/charts.js");
    const canvas = document.getElementById("blocks");
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const probe = document.createElement("canvas").getContext("2d");
    const names = {};
    for (const name of ["free", "cached", "in-use", "shared"]) {
        probe.fillStyle = style.getPropertyValue(`--${name}`).trim();
        names[probe.fillStyle] = name;
    }
    const { side, columns } = gridLayout(399, canvas.clientWidth);
    const counts = {};
    for (let i = 0; i < 399; i++) {
        const [x, y] = [(i % columns) * side + 4, Math.floor(i / columns) * side + 4];
        const [r, g, b] = context.getImageData(x, y, 1, 1).data;
        const name = names["#" + [r, g, b].map((v) => v.toString(16).padStart(2, "0")).join("")];
        counts[name] = (counts[name] ?? 0) + 1;
    }
    return counts;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_picture_is_that_of_the_endpoint(chromium, scheme):
    with slow_story() as server, tab(chromium, server.url, color_scheme=scheme) as one:
        page = one.page
        prompt = "once upon a time there was"
        body = dict(prompt=prompt, ignore_eos=True)

        async def load():
            post = partial(server.server.post, "/v1/completions")
            await post(prompt=prompt + " a fox. it was quick", max_tokens=3)
            return [asyncio.create_task(post(**body, max_tokens=900 + i)) for i in range(11)]

        tasks = server.do(load())
        page.wait_for_function("() => document.querySelectorAll('#requests tr').length >= 8")
        page.wait_for_function("() => document.getElementById('n-shared').textContent > 0")
        page.click("#pause")
        page.wait_for_selector("#engine-state[data-kind=paused]")
        drawn = float(page.get_attribute("#engine", "data-timestamp"))
        picture = next(p for p in one.pictures if p["timestamp"] == drawn)
        blocks = picture["blocks"]
        for state in ("free", "cached", "in_use", "shared"):
            assert int(page.inner_text(f"#n-{state.replace('_', '-')}")) == blocks[state]
        expected = {
            state: blocks[state.replace("-", "_")]
            for state in ("free", "cached", "in-use", "shared")
        }
        assert page.evaluate(CELLS) == {name: n for name, n in expected.items() if n}
        assert blocks["shared"] >= 6
        requests = picture["requests"]
        rows = page.locator("#requests tr")
        shown = requests["running"] + requests["waiting"]
        assert rows.count() == len(shown)
        for i, request in enumerate(shown):
            cells = rows.nth(i).locator("td").all_inner_texts()
            assert rows.nth(i).locator(".name").get_attribute("title") == request["id"]
            numbers = [int(text.replace(",", "")) for text in cells[2:]]
            assert numbers == [
                request[f"num_{n}"]
                for n in ("prompt_tokens", "output_tokens", "cached_tokens", "blocks")
            ]
        assert page.inner_text("#t-running") == f"{requests['num_running']} / 8"
        assert page.inner_text("#t-waiting") == str(requests["num_waiting"])
        step = picture["last_step"]
        assert page.inner_text("#n-decode") == str(step["num_decode_tokens"])
        assert page.inner_text("#n-prefill") == str(step["num_prefill_tokens"])
        page.click("#pause")
        page.wait_for_selector("#engine-state[data-kind=live]")

        async def end():
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        server.do(end())


def test_everything_is_reached_with_the_keyboard(chromium):
    with scripted("fine, thanks") as server, tab(chromium, server.url) as one:
        page = one.page
        page.wait_for_selector("#model option", state="attached")
        page.focus(".skip")
        reached = ["skip"]
        for _ in range(40):
            page.keyboard.press("Tab")
            name = page.evaluate(
                "(document.activeElement.id || document.activeElement.className || document.activeElement.tagName)"
            )
            if name in reached:
                break
            reached.append(name)
            ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert name == "BODY" or ring != "none", name
        order = [
            "skip",
            "model",
            "settings-button",
            "clear",
            "messages",
            "message",
            "send",
            "pause",
            "table",
            "blocks",
        ]
        assert [name for name in reached if name in order] == order
        page.focus("#message")
        page.keyboard.type("how are you")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("today?")
        page.keyboard.press("Enter")
        assert one.answer().locator(".text").inner_text() == "fine, thanks"
        assert page.locator(".user .text").inner_text() == "how are you\ntoday?"
        page.focus("#blocks")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.inner_text("#block-detail").startswith("Blocks 3 to 4:")
        page.keyboard.press("End")
        assert page.inner_text("#block-detail").startswith("Block 1,999:")


def test_a_phone_needs_no_sideways_scrolling(chromium):
    with scripted(WIDE) as server, tab(chromium, server.url, width=375, height=740) as one:
        page = one.page
        one.ask("wide " + "z" * 300)
        one.answer()
        page.click("#settings-button")
        overflows = """() => [...document.querySelectorAll("html, body, main, #chat, #messages, #engine, .card")]
            .filter((e) => e.scrollWidth > e.clientWidth + 1 && e.clientWidth).map((e) => e.id || e.className || e.tagName)"""
        assert page.evaluate(overflows) == []
        page.focus("#tab-chat")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-engine"
        assert page.is_visible("#engine") and not page.is_visible("#chat")
        page.wait_for_selector("#engine-state[data-kind=idle]")
        assert page.evaluate(overflows) == []
        small = """() => [...document.querySelectorAll("button, select, input, summary")]
            .filter((e) => e.offsetParent && e.getBoundingClientRect().height < 24).map((e) => e.id)"""
        assert page.evaluate(small) == []


def test_nothing_is_asked_of_the_engine_that_nobody_sees(chromium):
    with scripted("fine") as server, tab(chromium, server.url, width=375, height=740) as one:
        one.page.wait_for_selector("#model option", state="attached")
        one.ask("hi")
        one.answer()
        assert one.pictures == []
        one.page.click("#tab-engine")
        one.page.wait_for_selector("#engine-state[data-kind=idle]")
        assert one.pictures
