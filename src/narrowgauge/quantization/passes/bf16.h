/* The bits of float32 and bf16; shared by all passes. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define RESTRICT __restrict__
#define INLINE static inline __attribute__((always_inline))

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
INLINE float wide(uint16_t x) { return as_float((uint32_t)x << 16); }

/* To bf16, to nearest even; NaN stays NaN. */
INLINE uint16_t narrow(float x) {
  const uint32_t bits = as_bits(x), nearest = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : nearest);
}
