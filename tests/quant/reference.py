"""Independent float64 references for the codecs: search over all values, no shared code with `quant`."""

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

E4M3_NAN = 0x7F
E4M3_NANS = (0x7F, 0xFF)
E4M3_NUMBERS = [code for code in range(256) if code not in E4M3_NANS]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def e4m3_value(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([e4m3_value(code) for code in range(E4M3_NAN)])


def nearest_index(grid: F64, magnitudes: F64) -> npt.NDArray[np.int64]:
    """The index of the grid value nearest to each magnitude; of two equally near the one with the even index."""
    distance = np.abs(np.minimum(magnitudes, grid[-1])[:, None] - grid[None, :])
    tied = distance == distance.min(axis=1, keepdims=True)
    preference = np.where(np.arange(len(grid)) % 2 == 0, 2, 1)
    return np.asarray((tied * preference).argmax(axis=1))


def with_neighbours(points: F64) -> npt.NDArray[np.float32]:
    """Each point as float32, and the float32 before and after it."""
    exact = points.astype(np.float32)
    infinity = np.float32(np.inf)
    return np.concatenate([exact, np.nextafter(exact, -infinity), np.nextafter(exact, infinity)])
