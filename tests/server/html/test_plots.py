from server.html.plots import SERIES, as_svg, figure


def drawn(title: str = "a plot") -> str:
    with figure(rows=2, height=3.0) as (drawing, [[upper], [lower]]):
        upper.plot([0, 1], [1, 2], color=SERIES[0], label="ours")
        lower.plot([0, 1], [2, 1], color=SERIES[3])
        upper.legend()
        lower.set(xlabel="seconds", ylabel="< tokens")
        return as_svg(drawing, title)


def test_colours_are_the_pages_and_text_stays_text() -> None:
    svg = drawn()
    assert svg.startswith("<svg")
    assert svg.endswith("</svg>")
    for variable in ("ink", "faint", "grid", "series-1", "series-4"):
        assert f"var(--{variable})" in svg
    assert "#0a0b" not in svg
    assert ">seconds</text>" in svg
    assert "&lt; tokens</text>" in svg
    assert "<metadata" not in svg


def test_the_same_plot_is_the_same_text() -> None:
    assert drawn() == drawn()


def test_the_title_is_escaped_and_scaled_to_the_page() -> None:
    head = drawn('"a" & <b>').partition(">")[0]
    assert 'aria-label="&quot;a&quot; &amp; &lt;b&gt;"' in head
    assert "viewBox" in head
    assert "width=" not in head
