import pytest

from quant.calibrate import CalibrationSettings
from quant.calibration_text import Text
from quant.methods import Method
from quant.quantize import quantize_checkpoint
from tests.quant.tiny_model import TEXT, tiny_model


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("evaluated") / "source")


@pytest.fixture(scope="session")
def quantized(source):
    calibration = CalibrationSettings(Text(TEXT, "foxes"), windows=5, window_tokens=32)
    quantize_checkpoint(source, source.parent / "quantized", method=Method("quasar"), calibration=calibration)
    return source.parent / "quantized"
