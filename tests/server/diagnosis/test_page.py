from server.diagnosis.catalogue import load_catalogue
from server.diagnosis.page import PAGE, render


def test_the_page_in_the_repository_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(load_catalogue()), "run `python -m server.diagnosis.page`"


def test_the_page_has_an_anchor_cause_and_remedy_for_every_entry() -> None:
    text = render(load_catalogue())
    for entry in load_catalogue():
        assert f'<a id="{entry.id}">' in text
        assert entry.cause in text
        assert all(step in text for step in entry.remedy)
