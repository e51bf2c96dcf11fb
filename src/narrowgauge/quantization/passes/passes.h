/* The record of a pass over a tensor, and the rounding of one value; shared by the C of this folder. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define RESTRICT __restrict__

enum { NEAREST_EVEN, HALF_AWAY, TOWARD_ZERO, STOCHASTIC };
enum { VALUES, STORED, CODES };
enum { FLOAT32, BFLOAT16, UINT8 };
enum { MAE, MSE, MAX };

typedef struct {
  const void *x;
  const float *encode, *block, *above, *uniform; /* one a block; uniform: one an element */
  void *out;
  float *sums;
  int64_t batch, rows, columns, block_rows, block_columns;
  uint64_t offset; /* of the first element's random bits */
  uint32_t key[2], exponent_inverse;
  int32_t x_type, out_type, divides, rounding, random_bits, result, choose, contracts_columns;
  int32_t exponent_min, exponent_quantum, negative_zero; /* of the element format */
  int32_t bits, mantissa_bits, twos_complement;
  float largest, divisor;
} Pass;

static inline float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t as_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

/* A number to the grid; `uniform` is for STOCHASTIC only. NaN stays NaN, as every comparison with it is false. */
static inline __attribute__((always_inline)) float rounded(const Pass *p, float x, int rounding, int is_short, float uniform) {
  x = x > p->largest ? p->largest : x;
  x = x < -p->largest ? -p->largest : x;
  int32_t exponent = (int32_t)(as_bits(x) & 0x7F800000u);
  exponent = exponent < p->exponent_min ? p->exponent_min : exponent;
  x *= as_float(p->exponent_inverse - (uint32_t)exponent);
  if (rounding == NEAREST_EVEN) {
    if (p->mantissa_bits == 0) /* a code a binade: a tie above an even code belongs to it */
      x = as_float(as_bits(x) - ((uint32_t)(exponent - p->exponent_min) >> 23 & 1));
    x = rintf(x);
  } else {
    const float magnitude = fabsf(x), lower = floorf(magnitude), fraction = magnitude - lower;
    float up = 0;
    if (rounding == HALF_AWAY) up = fraction >= 0.5f ? 1.0f : 0.0f;
    if (rounding == STOCHASTIC && !is_short) up = fraction > uniform ? 1.0f : 0.0f;
    if (rounding == STOCHASTIC && is_short) {
      const float steps = (float)((uint32_t)1 << p->random_bits);
      up = fraction >= 1.0f - floorf(uniform * steps) * (1.0f / steps) ? 1.0f : 0.0f;
    }
    x = as_float((as_bits(x) & 0x80000000u) | as_bits(lower + up));
  }
  x *= as_float((uint32_t)(exponent - p->exponent_quantum));
  return p->negative_zero ? x : x + 0.0f;
}
