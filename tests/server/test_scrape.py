import pytest

from server.scrape import ScrapeError, parse, scrape


def test_values_of_all_series_are_kept_by_the_samples_name() -> None:
    text = (
        "# TYPE a_total counter\na_total{x='1'} 2\n".replace("'", '"')
        + '# TYPE g gauge\ng{r="1"} 0.5\ng{r="2"} 0.25\n'
        + '# TYPE h histogram\nh_bucket{le="+Inf"} 3\nh_count 3\nh_sum 1.5\n'
    )
    got = parse(text)
    assert (got.sum("a_total"), got.sum("g"), got.largest("g"), got.sum("h_sum")) == (2, 0.75, 0.5, 1.5)
    assert "g" in got
    assert "none" not in got
    assert (got.sum("none"), got.largest("none")) == (0, 0)


def test_what_is_no_such_text_is_an_error() -> None:
    with pytest.raises(ScrapeError, match="expected Prometheus' text format"):
        parse("a{ 1")


def test_a_server_that_is_not_there_is_an_error_with_its_address() -> None:
    with pytest.raises(ScrapeError, match=r"http://127\.0\.0\.1:9/metrics"):
        scrape("http://127.0.0.1:9")
