"""`voltserve verify`: what is wrong with a model directory, before it is loaded. Imports no torch."""

from quant.verify.findings import Finding
from quant.verify.report import Depth, Report, verify

__all__ = ["Depth", "Finding", "Report", "verify"]
