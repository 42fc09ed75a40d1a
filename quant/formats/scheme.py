"""What every format's config comes down to, and how its tensors are named. Torch-free."""

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LinearLayout:
    """Which tensors stand for a linear [N, K]; their dtypes, shapes and nibble order are the same in all such formats.

    codes: uint8 [N, K/2], the even column in the low nibble. scales: float8_e4m3fn [N, K/g].
    global_scale: float32 scalar; the weight is code * scale / it where `divides`, code * scale * it otherwise.
    input_scale: float32 scalar of models that quantize activations too (W4A4), in the same direction.
    """

    codes: str
    scales: str
    global_scale: str
    input_scale: str
    divides: bool

    def parts(self, rows: int, columns: int, group_size: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """(suffix, safetensors dtype, shape) of the tensors that stand for a linear [rows, columns]."""
        return (
            (self.codes, "U8", (rows, columns // 2)),
            (self.scales, "F8_E4M3", (rows, columns // group_size)),
            (self.global_scale, "F32", (1,)),
        )


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized, whatever its format.

    format: its name in quant/formats/registry.py. source: the file (and key) that says so.
    ignore: module names, or patterns after "re:" (compressed-tensors' syntax), left in 16 bits; None when the config
    does not say, so that the tensors decide.
    w4a4: the model was made for 4-bit activations too; its weights are read the same.
    kv_cache: what the config wants of the key/value cache: "fp8", "nvfp4" or nothing.
    pre_quant_scale: linears may carry a `pre_quant_scale` [K] by which their input is multiplied (AWQ).
    """

    format: str = field(compare=False)
    source: str = field(compare=False)
    layout: LinearLayout
    group_size: int
    ignore: tuple[str, ...] | None
    w4a4: bool = False
    kv_cache: str = ""
    pre_quant_scale: bool = False


def wildcard_pattern(wildcard: str) -> str:
    """The "re:" pattern of a ModelOpt or AutoRound name, in which `*` and `?` stand for any text and any character.

    A name covers the modules below it too, and may start at any module boundary, since old exports leave out prefixes
    such as `language_model.`; it never matches inside a name, so that `layers.1` is not `layers.10`.
    """
    body = re.escape(wildcard).replace(r"\*", ".*").replace(r"\?", ".")
    return rf"re:(?:.*\.)?{body}(?:\..*)?$"
