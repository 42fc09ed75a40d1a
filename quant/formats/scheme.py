"""The common content of every format's config, and the names of its tensors. Torch-free."""

import re
from dataclasses import dataclass, field

from quant.formats.weights import Element


@dataclass(frozen=True)
class LinearLayout:
    """The names of the tensors that represent a linear [N, K]. Dtypes, shapes and nibble order are the same everywhere.

    codes: uint8 [N, K/2], the even column in the low nibble. scales: float8_e4m3fn [N, K/g].
    global_scale: float32 scalar.
    divides: the weight is code * scale / global_scale. Otherwise it is code * scale * global_scale.
    input_scale: float32 scalar of models that quantize activations too (W4A4), in the same direction.
    """

    codes: str
    scales: str
    global_scale: str
    input_scale: str
    divides: bool

    def parts(self, rows: int, columns: int, group_size: int) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
        """(suffix, safetensors dtype, shape) of the tensors of a linear [rows, columns]."""
        return (
            (self.codes, "U8", (rows, columns // 2)),
            (self.scales, "F8_E4M3", (rows, columns // group_size)),
            (self.global_scale, "F32", (1,)),
        )


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint is quantized, independent of its format.

    format: its name in quant/formats/registry.py. source: the file (and key) that says so.
    ignore: modules in 16 bits: names, or patterns after "re:" (compressed-tensors' syntax). None: the config has no
        such list, and the tensors decide.
    w4a4, w8a8: the model was made for 4-bit or 8-bit activations too. Its weights are read in the same way.
    elements: those that the config says linears have.
    by_tensors: the tensors decide which linears are quantized and how, even where `ignore` of the format is exact.
    kv_cache: the key/value cache that the config asks for: "fp8", "nvfp4" or "".
    pre_quant_scale: linears may have a `pre_quant_scale` [K], a factor on their input (AWQ).
    """

    format: str = field(compare=False)
    source: str = field(compare=False)
    layout: LinearLayout
    group_size: int
    ignore: tuple[str, ...] | None
    w4a4: bool = False
    kv_cache: str = ""
    pre_quant_scale: bool = False
    w8a8: bool = False
    elements: tuple[Element, ...] = ("E2M1",)
    by_tensors: bool = False


def wildcard_pattern(wildcard: str) -> str:
    """The "re:" pattern of a ModelOpt or AutoRound name. `*` means any text, `?` any character.

    A name covers the modules below it too. It may start at any module boundary, since old exports leave out prefixes
    such as `language_model.`. It never ends inside a name: `layers.1` is not `layers.10`.
    """
    body = re.escape(wildcard).replace(r"\*", ".*").replace(r"\?", ".")
    return rf"re:(?:.*\.)?{body}(?:\..*)?$"
