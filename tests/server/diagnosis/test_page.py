import re

import pytest
import yaml

from server.diagnosis.catalogue import Entry, load_catalogue
from server.diagnosis.page import CHINESE, CHINESE_PAGE, CHINESE_TEXTS, PAGE, render, translated


def test_the_page_in_the_repository_is_current() -> None:
    remedy = "run `python -m server.diagnosis.page`"
    assert PAGE.read_text(encoding="utf-8") == render(load_catalogue()), remedy
    assert CHINESE_PAGE.read_text(encoding="utf-8") == render(translated(load_catalogue()), CHINESE), remedy


def test_the_page_has_an_anchor_cause_and_remedy_for_every_entry() -> None:
    text = render(load_catalogue())
    for entry in load_catalogue():
        assert f'<a id="{entry.id}">' in text
        assert entry.cause in text
        assert all(step in text for step in entry.remedy)


def commands(text: str) -> list[str]:
    """What a reader types or looks for: code, flags, variables; in any order, since languages differ in it."""
    return sorted(re.findall(r"`[^`]+`|--[a-z-]+|[A-Z][A-Z0-9]*_[A-Z0-9_]+(?:=\w+)?", text))


@pytest.mark.parametrize("entry", load_catalogue(), ids=lambda entry: entry.id)
def test_each_entry_names_the_same_commands_in_chinese(entry: Entry) -> None:
    (chinese,) = translated([entry])
    assert re.search("[\u4e00-\u9fff]", chinese.title)
    assert commands(chinese.cause) == commands(entry.cause)
    assert [commands(step) for step in chinese.remedy] == [commands(step) for step in entry.remedy]


def test_no_entry_is_translated_that_there_is_not() -> None:
    texts = yaml.safe_load(CHINESE_TEXTS.read_text(encoding="utf-8"))
    assert set(texts) == {entry.id for entry in load_catalogue()}
    assert all(set(text) == {"title", "cause", "remedy"} for text in texts.values())
