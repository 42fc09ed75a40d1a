"""`voltserve eval`: all measures of a model, beside those of its 16-bit source, in one report."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quant.calibration_text import Text
from quant.errors import QuantError
from quant.evaluate.local import LocalModel, load_local
from quant.evaluate.long_output import LongOutputResult, write_long
from quant.evaluate.questions import QuestionsResult, ask, load_questions
from quant.evaluate.server import ServerModel
from quant.evaluate.text import TextResult, measure_text
from quant.formats import quantize_config
from quant.progress import OnProgress, Progress, ignore_progress

PARTS = ("text", "questions", "long")


@dataclass(frozen=True)
class EvalSettings:
    """`parts`: which of PARTS. `tokens` and `window` are for the text, `long_tokens` for each long output.

    `w4a4` emulates dynamic 4-bit activations on a quantized directory, for comparison with engines that round them.
    """

    text: Text
    parts: tuple[str, ...] = PARTS
    tokens: int = 4096
    window: int = 512
    long_tokens: int = 256
    w4a4: bool = False


@dataclass(frozen=True)
class ModelResult:
    """A model's measures. None if not asked for or not possible (EvalReport.notes says which)."""

    name: str
    text: TextResult | None = None
    questions: QuestionsResult | None = None
    long_output: LongOutputResult | None = None


@dataclass(frozen=True)
class EvalReport:
    """`model`, and `source` if one was given. `settings` hold the text's SHA-256. `notes` are for the reader."""

    model: ModelResult
    source: ModelResult | None
    settings: dict[str, object]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def evaluate_directory(
    directory: Path, source: Path | None, settings: EvalSettings, on_progress: OnProgress = ignore_progress
) -> EvalReport:
    """Measures the model in `directory`, against that in `source` if given. Raises QuantError as the measures do."""
    _refuse_calibration_text(directory, settings.text)
    notes = [] if source else ["No source was named: the KL divergence and comparisons with 16 bits were not measured."]
    if settings.w4a4:
        notes.append("Activations were rounded to NVFP4 as W4A4 engines do; voltserve on a V100 keeps them in 16 bits.")
    on_progress(Progress("loading models", 0, 1, "models"))
    model = load_local(directory, quantize_activations=settings.w4a4)
    reference = load_local(source) if source else None
    on_progress(Progress("loading models", 1, 1, "models"))
    result, source_result = ModelResult(model.name), ModelResult(reference.name) if reference else None
    if "text" in settings.parts:
        # The source is measured too, against itself, on the same tokens.
        models = {"model": model} | ({"source": reference} if reference else {})
        measured = measure_text(
            models,
            settings.text,
            reference=reference,
            tokens=settings.tokens,
            window=settings.window,
            on_progress=on_progress,
        )
        result = replace(result, text=measured["model"])
        source_result = source_result and replace(source_result, text=measured["source"])
    result = _answer_and_write(result, model, "the model", settings, on_progress)
    if reference and source_result:
        source_result = _answer_and_write(source_result, reference, "the source", settings, on_progress)
    return EvalReport(result, source_result, _described(settings, result), tuple(notes))


def _refuse_calibration_text(directory: Path, text: Text) -> None:
    """Raises QuantError when the model was calibrated on `text`: it would look better there than it is."""
    if not (directory / quantize_config.FILE_NAME).exists():
        return
    if quantize_config.read(directory).calibration_sha256 == text.sha256:
        raise QuantError(
            f"{text.source}: expected a text that the model was not calibrated on, got that very text",
            "Name another with --text",
        )


def evaluate_server(
    server: ServerModel, settings: EvalSettings, on_progress: OnProgress = ignore_progress
) -> EvalReport:
    """Measures the model behind a running server. Raises QuantError when it does not answer or W4A4 is asked of it."""
    if settings.w4a4:
        raise QuantError("W4A4: expected a model directory, got a server", "Leave the option out")
    server = server.connected()
    notes = (
        "A server does not return its whole distribution: the KL divergence was not measured.",
        "Text windows are cut by characters on a server; compare perplexity with other servers, not with directories.",
    )
    result = ModelResult(f"{server.name} at {server.url}")
    if "text" in settings.parts:
        result = replace(
            result, text=server.measure_text(settings.text, tokens=settings.tokens, on_progress=on_progress)
        )
    result = _answer_and_write(result, server, "the model", settings, on_progress)
    described = _described(settings, result)
    del described["window"]  # windows are cut by characters here
    return EvalReport(result, None, described, notes)


def _answer_and_write(
    result: ModelResult, model: LocalModel | ServerModel, who: str, settings: EvalSettings, on_progress: OnProgress
) -> ModelResult:
    if "questions" in settings.parts:
        questions = ask(model.score, load_questions(), f"asking {who}", on_progress)
        result = replace(result, questions=questions)
    if "long" in settings.parts:
        written = write_long(model.generate, settings.long_tokens, f"{who} writes", on_progress=on_progress)
        result = replace(result, long_output=written)
    return result


def _described(settings: EvalSettings, result: ModelResult) -> dict[str, object]:
    """`tokens` were measured. Fewer than asked for if the text ends; more if a server's last window ends later."""
    return {
        **{key: value for key, value in asdict(settings).items() if key not in {"text", "tokens"}},
        "tokens_asked": settings.tokens,
        "tokens": result.text.tokens if result.text else 0,
        "text": settings.text.source,
        "text_sha256": settings.text.sha256,
    }
