import re

from server.html.document import definitions, document, heading, paragraph, table


def test_a_page_escapes_what_it_is_given_and_needs_nothing_beside_it() -> None:
    parts = [
        heading("<h>"),
        paragraph("<p>", "note"),
        table(("a<", "b"), [("<x>", "1")]),
        definitions([("<w>", "<m>")]),
        "",
    ]
    page = document("<title>", parts)
    body = page.partition("<body>")[2]
    for text in ("title", "h", "p", "x", "w", "m"):
        assert f"&lt;{text}&gt;" in body
    assert "a&lt;" in body
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert 'class="note"' in body


def test_colours_are_given_for_light_and_dark() -> None:
    style = document("t", []).partition("</style>")[0]
    light, dark = style.split("prefers-color-scheme: dark")
    for variable in ("paper", "ink", "faint", "grid", "series-1", "series-2", "series-3", "series-4"):
        found = [re.search(rf"--{variable}: (#[0-9a-f]{{6}})", part) for part in (light, dark)]
        assert found[0] and found[1]
        assert found[0][1] != found[1][1]


def test_words_are_on_the_left_and_figures_on_the_right() -> None:
    assert '<td class="text">a</td><td>1</td><td class="text">b</td>' in table("xyz", [("a", "1", "b")], text=(0, 2))
