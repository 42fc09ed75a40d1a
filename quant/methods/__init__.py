"""How the numbers of an NVFP4 matrix are found: block scales by a policy, codes with or without error compensation."""

from dataclasses import dataclass

from quant.formats.quantize_config import ScalePolicy


@dataclass(frozen=True)
class Method:
    """How codes and scales are found: a policy of quant/methods/scales.py, with or without error compensation."""

    policy: ScalePolicy = "mse"
    compensate: bool = False

    @property
    def calibrates(self) -> bool:
        """Whether it runs the model over calibration text."""
        return self.compensate or self.policy == "quasar"

    @property
    def name(self) -> str:
        """As written to quantize_config.json's scale_policy."""
        return f"{self.policy}+compensation" if self.compensate else self.policy

    @property
    def flags(self) -> str:
        """The options of `voltserve quantize` that choose it."""
        return f"--method {self.policy}" + (" --compensate" if self.compensate else "")


DEFAULT_METHOD = Method()
