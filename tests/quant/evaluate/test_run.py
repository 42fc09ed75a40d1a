import json
import re
from html.parser import HTMLParser

import pytest

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.evaluate.report import as_html, as_text, bar_chart
from quant.evaluate.run import EvalReport, EvalSettings, evaluate_directory
from tests.quant.tiny_model import TEXT

JUGS = Text("pack my box with five dozen liquor jugs. " * 10, "jugs & <jars>")
SETTINGS = EvalSettings(JUGS, tokens=200, window=64, long_tokens=12)


class Balanced(HTMLParser):
    """Fails on a tag that is not closed, or closed without having been opened."""

    VOID = ("meta",)

    def __init__(self):
        super().__init__()
        self.open = []
        self.text = []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def kl(report: EvalReport) -> float:
    """The model's KL divergence from its source."""
    assert report.model.text is not None
    assert report.model.text.kl is not None
    return report.model.text.kl


@pytest.fixture(scope="module")
def report(source, quantized):
    return evaluate_directory(quantized, source, SETTINGS)


def test_model_and_source_are_measured_alike(report, source, quantized):
    assert (report.model.name, report.source.name) == (str(quantized), str(source))
    assert report.model.text.kl > 0
    assert report.source.text.kl == 0
    assert report.model.text.tokens == report.source.text.tokens == 199
    assert report.model.questions.questions == report.source.questions.questions
    prompts = [[output.prompt for output in one.long_output.outputs] for one in (report.model, report.source)]
    assert prompts[0] == prompts[1]


def test_the_json_names_the_text_by_its_digest_and_not_by_its_words(report):
    written = json.dumps(report.as_dict())

    settings = json.loads(written)["settings"]
    assert (settings["tokens"], settings["tokens_asked"], settings["window"]) == (199, 200, 64)
    assert json.loads(written)["settings"]["text_sha256"] == SETTINGS.text.sha256
    assert "liquor" not in json.dumps(json.loads(written)["settings"])


def test_the_page_is_well_formed_and_shows_every_part(report):
    page = as_html(report)

    parser = Balanced()
    parser.feed(page)
    assert not parser.open
    text = " ".join(parser.text)
    for words in ("Text (199 tokens)", "KL divergence", "Questions (", "Long outputs", "jugs & <jars>"):
        assert words in text
    assert page.count("<svg") == 3
    assert "http" not in page


def test_without_a_source_page_and_lines_hold_the_model_alone(quantized):
    report = evaluate_directory(quantized, None, EvalSettings(SETTINGS.text, ("text",), tokens=100, window=64))

    assert report.source is None
    assert any("No source was named" in line for line in as_text(report).splitlines())
    page = as_html(report)
    assert "Questions (" not in page
    assert page.count("<svg") == 1
    assert ">source<" not in page


def test_the_lines_give_the_source_in_parentheses(report):
    lines = as_text(report).splitlines()

    expected = f"perplexity: {report.model.text.perplexity:.4f} ({report.source.text.perplexity:.4f})"
    assert expected in lines


def test_measuring_on_the_text_of_calibration_is_refused(quantized):
    with pytest.raises(QuantError, match="foxes: expected a text that the model was not calibrated on"):
        evaluate_directory(quantized, None, EvalSettings(Text(TEXT, "foxes")))


def test_w4a4_is_noted_and_worse(report, quantized, source):
    rounded = evaluate_directory(
        quantized, source, EvalSettings(SETTINGS.text, ("text",), tokens=200, window=64, w4a4=True)
    )

    assert kl(rounded) > kl(report)
    assert any("Activations were rounded" in note for note in rounded.notes)


def test_bars_are_as_long_as_their_values_and_none_has_no_bar():
    chart = bar_chart("x", {"a": [1.0, 0.5], "b": [None, 0.25]}, ("model", "source"))

    lengths = [float(width) for width in re.findall(r'<rect x="180" y="\d+" width="([\d.]+)" height="14"', chart)]
    assert lengths == [pytest.approx(470.0), pytest.approx(235.0), pytest.approx(117.5)]
