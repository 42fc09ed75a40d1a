import re

from server.machine import describe_machine, processor, today


def test_the_processors_name_is_found_or_said_to_be_unknown() -> None:
    assert processor("processor\t: 0\nmodel name\t: AMD EPYC 7B13\nflags\t: avx2\n") == "AMD EPYC 7B13"
    assert processor("processor\t: 0\n") == "unknown processor"


def test_a_result_says_where_and_when() -> None:
    found = describe_machine()
    assert found["cores"] >= 1
    assert found["load_average"] >= 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", today())
