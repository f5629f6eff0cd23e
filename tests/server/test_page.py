"""The page's files, and `/anatomy`, which feeds it."""

from __future__ import annotations

import asyncio
import logging
import re
from html.parser import HTMLParser

import httpx

from jaxinfer.server import page
from tests.engine.blocks_by_hand import check_blocks, states_by_hand
from tests.server.browser import served
from tests.server.scripted_server import run as run_scripted
from tests.server.story_server import StoryServer, error_of, run, story_server

TEXT = "/v1/completions"
FOLDER = page.files("jaxinfer.server") / "page_files"


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.found.append((tag, dict(attrs)))


def test_every_file_is_served_with_its_type_and_policy():
    async def use(server: StoryServer):
        paths = {"/": "index.html"} | {f"/page/{file.name}": file.name for file in FOLDER.iterdir()}
        for path, name in paths.items():
            answer = await server.http.get(path)
            assert answer.status_code == 200 and answer.content == (FOLDER / name).read_bytes()
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["x-content-type-options"] == "nosniff"
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self';" in policy
            assert "unsafe" not in policy and "*" not in policy and "http" not in policy
            kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
            assert answer.headers["content-type"].startswith(
                kind.get(name.rsplit(".", 1)[1], "image/svg+xml")
            )
            again = {"if-none-match": f'"other", W/{answer.headers["etag"]}'}
            same = await server.http.get(path, headers=again)
            assert same.status_code == 304 and not same.content
            assert same.headers["etag"] == answer.headers["etag"]
            assert (await server.http.get(path, headers={"if-none-match": '"x"'})).content
            assert (await server.http.head(path)).status_code == 200
        for path in ("/page/no.js", "/page/", "/page/../app.py", "/page/%2e%2e%2fapp.py"):
            answer = await server.http.get(path)
            assert answer.status_code == 404 and error_of(answer)["type"] == "not_found_error"

    run(use)


def test_the_page_needs_nothing_from_elsewhere_and_holds_no_inline_code():
    names = {file.name for file in FOLDER.iterdir()}
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in names}
    elements = Elements(texts["index.html"]).found
    for tag, attributes in elements:
        assert tag != "style" and not any(name.startswith("on") for name in attributes)
        assert "style" not in attributes
        for name in ("src", "href"):
            target = attributes.get(name)
            if target is not None and not target.startswith("#"):
                assert target.removeprefix("page/") in names
        assert tag != "script" or attributes.get("src")
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for name, text in texts.items():
        if name.endswith(".js"):
            assert set(re.findall(r'from "\./([^"]+)"', text)) <= names
            for id in re.findall(r'byId\("([^"]+)"\)', text):
                assert id in ids, f"{name}: {id}"
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|localStorage", text
            )
        assert not re.search(r"(?:src|href|url|import|fetch)\W{1,3}https?://", text)
        assert len(text) < 32_000


def test_anatomy_tells_what_the_core_holds():
    async def use(server: StoryServer):
        at_once = []
        take = server.core.anatomy

        def anatomy():
            picture = take()
            check_blocks(server.core, picture)
            at_once.append((picture, states_by_hand(server.core)))
            return picture

        server.core.anatomy = anatomy
        posts = [server.post(TEXT, prompt="once upon a time", max_tokens=60 + i) for i in range(12)]
        answers = asyncio.gather(*posts)
        pictures = []
        while not answers.done():
            answer = await server.http.get("/anatomy")
            assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
            pictures.append(answer.json())
            await asyncio.sleep(0)
        await answers
        for picture in pictures:
            taken, by_hand = next(p for p in at_once if p[0]["timestamp"] == picture["timestamp"])
            assert {name: picture[name] for name in taken} == taken
            assert picture["blocks"]["num_blocks"] == len(by_hand) == 399
        assert pictures[0]["model"] == "story" and pictures[0]["num_engines"] == 1
        assert pictures[0]["limits"] == {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 128,
            "block_size": 4,
            "prefix_caching": True,
            "num_speculative_tokens": 0,
        }
        busiest = max(pictures, key=lambda p: p["requests"]["num_running"])
        assert busiest["requests"]["num_running"] <= 8

    run(use)


def test_counts_of_anatomy_are_those_of_the_metrics():
    async def use(server: StoryServer):
        for i in range(3):
            await server.ok(TEXT, prompt="once upon a time", max_tokens=8 + i)
        await server.until_idle()
        picture = (await server.http.get("/anatomy?engine=0")).json()
        counters = picture["counters"]
        assert counters["prompt_tokens"] == 48 and counters["generation_tokens"] == 27
        assert counters["prefix_cache_queries"] == 48 and counters["prefix_cache_hits"] == 24
        assert counters["num_preemptions"] == 0
        ttft = picture["histograms"]["time_to_first_token_seconds"]
        itl = picture["histograms"]["inter_token_latency_seconds"]
        assert ttft["count"] == sum(ttft["counts"]) == 3
        assert itl["count"] == sum(itl["counts"]) == 24
        for one in (ttft, itl):
            assert len(one["counts"]) == len(one["bounds"]) + 1
            assert one["bounds"] == sorted(one["bounds"]) and one["sum"] > 0
        name = "jaxinfer:time_to_first_token_seconds_bucket"
        text = (await server.http.get("/metrics")).text
        shown = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)]
        total = 0.0
        for before, value in zip(ttft["counts"], shown, strict=True):
            total += before
            assert total == float(value)

    run(use)


def test_the_access_log_leaves_out_what_the_page_asks_all_the_time():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("uvicorn.access")
    with served(story_server, log_level="info") as server:
        log.addHandler(handler)
        try:
            for path in ("/anatomy", "/anatomy?engine=0", "/anatomy?engine=9", "/health"):
                httpx.get(server.url + path)
        finally:
            log.removeHandler(handler)
    assert [line.split('"')[1] for line in lines] == [
        "GET /anatomy?engine=9 HTTP/1.1",
        "GET /health HTTP/1.1",
    ]


def test_whoever_asks_at_once_gets_one_picture():
    async def use(server: StoryServer):
        taken = []
        take = server.core.anatomy
        server.core.anatomy = lambda: taken.append(1) or take()
        answers = await asyncio.gather(*(server.http.get("/anatomy") for _ in range(40)))
        assert len(taken) == 1 and len({answer.content for answer in answers}) == 1

    run(use)


def test_an_engine_that_is_not_there_is_refused():
    async def use(server: StoryServer):
        for engine in ("1", "-1", "x"):
            answer = await server.http.get(f"/anatomy?engine={engine}")
            assert answer.status_code == 400
            assert "engine" in error_of(answer)["message"]

    run(use)


def test_a_dead_engine_says_so():
    async def use(server: StoryServer):
        server.executor.next_token = lambda context: 1 // 0
        await server.post(TEXT, prompt="once", max_tokens=3)
        for _ in range(2):
            answer = await server.http.get("/anatomy")
            assert answer.status_code == 503 and "ZeroDivision" in error_of(answer)["message"]
        assert (await server.http.get("/")).status_code == 200

    run(use)


def test_a_key_opens_the_anatomy_and_the_page_is_there_without():
    async def use(server: StoryServer):
        assert (await server.http.get("/")).status_code == 200
        assert (await server.http.get("/page/app.js")).status_code == 200
        for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            answer = await server.http.get("/anatomy", headers=headers)
            assert answer.status_code == status

    run(use, dict(api_key=("secret",)))


def test_the_page_can_be_turned_off():
    async def use(server: StoryServer):
        for path in ("/", "/page/app.js", "/anatomy"):
            assert (await server.http.get(path)).status_code == 404
        assert (await server.http.get("/v1/models")).status_code == 200

    run(use, dict(disable_page=True))


def test_a_proxy_may_serve_it_under_a_path():
    async def use(server: StoryServer):
        assert (await server.http.get("/under/here/")).content.startswith(b"<!doctype html>")
        assert (await server.http.get("/under/here/page/app.js")).status_code == 200
        assert (await server.http.get("/under/here/anatomy")).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await server.http.get("/under/here/anatomy", headers=key)).status_code == 200

    run(use, dict(api_key=("secret",)), root_path="/under/here")


def test_no_text_of_a_prompt_is_told():
    async def use(server):
        secret = "a-very-private-question"
        body = dict(messages=[{"role": "user", "content": secret}], max_tokens=400)
        asked = asyncio.create_task(server.post("/v1/chat/completions", **body))
        seen = 0
        while not asked.done():
            text = (await server.http.get("/anatomy")).text
            seen += '"state":"running"' in text
            assert secret not in text
            await asyncio.sleep(0)
        assert (await asked).status_code == 200

    run_scripted(None, use)
