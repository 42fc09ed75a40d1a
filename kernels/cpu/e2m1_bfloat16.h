// E2M1's 16 values as the two bytes of a bfloat16, as tables for byte shuffles. kHigh holds the sign and 7 bits of the exponent.
// kLow holds the exponent's last bit and the mantissa.
#pragma once

#include <cstdint>

namespace voltserve::cpu {

alignas(16) constexpr uint8_t kHigh[16] = {0x00, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                           0x80, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
alignas(16) constexpr uint8_t kLow[16] = {0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0,
                                          0x00, 0x00, 0x80, 0xC0, 0x00, 0x40, 0x80, 0xC0};

}  // namespace voltserve::cpu
