"""`voltserve verify`: what is wrong with a model directory, before it is loaded. Imports no torch."""

from quant.verify.findings import Finding
from quant.verify.report import Depth, Report, verify
from quant.verify.servable import Examination, Target, examine

__all__ = ["Depth", "Examination", "Finding", "Report", "Target", "examine", "verify"]
