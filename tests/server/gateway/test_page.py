import base64
import hashlib
import re

from server.supervisor import State
from tests.server.gateway.inprocess import InProcess


async def test_the_page_is_served_and_nothing_but_its_own_script_and_style_may_run() -> None:
    reply = await InProcess().client.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        assert len(blocks) == 1
        digest = base64.b64encode(hashlib.sha256(blocks[0].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


async def test_the_page_needs_nothing_from_elsewhere_and_no_inline_handlers() -> None:
    page = (await InProcess().client.get("/")).text
    assert not re.findall(r"https?://|//[a-z]", page.replace("http://www.w3.org", ""))
    assert not re.findall(r"\son[a-z]+=|\sstyle=|innerHTML|<script [^>]*src", page)


async def test_the_page_is_sent_more_than_once_and_only_for_reading() -> None:
    client = InProcess().client
    assert (await client.get("/")).content == (await client.get("/")).content
    assert (await client.head("/")).content == b""
    assert (await client.post("/")).status_code == 405


async def test_all_that_the_page_says_is_said_in_chinese_too() -> None:
    page = (await InProcess().client.get("/")).text
    table = re.search(r"const CHINESE = \{\n(.*?)^\};", page, re.DOTALL | re.MULTILINE)
    assert table
    chinese = dict(re.findall(r'^  "(.*)": "(.*)",$', table[1], re.MULTILINE))
    body = page.partition("<body>")[2].partition("<script>")[0]
    words = {text.strip() for text in re.findall(r">([^<>]+)<", body)} - {"", "voltserve", "…", "–"}
    attributes = set(re.findall(r'(?:placeholder|aria-label)="([^"]*)"', body))
    said = set(re.findall(r'say\("([^"]*)"', page)) | set(re.findall(r', "(\{\} \w+)"\]', page))
    states = {state.value for state in State}
    assert words | attributes | said | states | {"unreachable"} == set(chinese)
    for english, translated in chinese.items():
        assert translated
        assert translated.count("{}") == english.count("{}"), english
