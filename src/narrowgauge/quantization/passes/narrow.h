/* The records of a pass over a tensor, and the rounding of one value; shared by narrow.c and scales.h. */

#include "bf16.h"

#define FLOAT_MAX 3.40282347e38f
#define STRIP 1024 /* columns of a unit, at least; whole blocks */

enum { NEAREST_EVEN, HALF_AWAY, TOWARD_ZERO, STOCHASTIC };
enum { VALUES, STORED, CODES, SCALES, SUMS };
enum { FLOAT32, BFLOAT16 };
enum { MAE, MSE, MAX };
enum { FLOOR, CEIL, EVEN, RCEIL, FP32, NVFP4, ROUNDED };

typedef struct { /* of a format */
  uint32_t exponent_inverse;
  int32_t exponent_min, exponent_quantum, negative_zero, bits, mantissa_bits, twos_complement;
  float largest;
} Grid;

typedef struct { /* what a cast says */
  Grid element, scale; /* scale: of rounded ones */
  int32_t rounding, random_bits, rule, emax, half, keeps_power, zeros, to_bf16, choose, candidates;
  float factor, aim, largest, instead, stretch[8]; /* stretch: of each candidate */
  double target;
} Cast;

typedef struct { /* one tensor */
  const Cast *cast;
  const void *x, *table; /* table: of decode_pass */
  const float *uniform; /* one an element, or 0: the stream of `key` from `offset` on */
  const float *over;    /* the amax that an outer scale comes from, one or, if over_each, one a block; or 0 */
  const float *finite;  /* not 0 where a block is; only if is_given */
  float *amax;          /* of each block, if known; amax_pass writes it */
  float *encode, *block; /* of each block: read if is_given, else written if not 0 */
  float *above;         /* the outer scale, one for each entry of `over` */
  void *out;
  float *sums;
  int64_t batch, rows, columns, block_rows, block_columns;
  uint64_t offset; /* of the first element's random bits */
  uint32_t key[2];
  int32_t x_type, out_type, result, divides, contracts_columns;
  int32_t is_one, is_given, over_each; /* is_one: the tensor is one block, whose pieces are units */
} Narrow;

typedef struct { int64_t batch, first, last, row0, row1, blocks, entry; } Unit;

typedef struct { float amax[STRIP], encode[STRIP], block[STRIP], finite[STRIP], above[STRIP]; } Scales;

/* A number to the grid; `uniform` is for STOCHASTIC only. NaN stays NaN, as every comparison with it is false. */
INLINE float rounded(const Grid *p, float x, int rounding, int random_bits, float uniform) {
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
    if (rounding == STOCHASTIC && random_bits == 24) up = fraction > uniform ? 1.0f : 0.0f;
    if (rounding == STOCHASTIC && random_bits != 24) {
      const float steps = (float)((uint32_t)1 << random_bits);
      up = fraction >= 1.0f - floorf(uniform * steps) * (1.0f / steps) ? 1.0f : 0.0f;
    }
    x = as_float((as_bits(x) & 0x80000000u) | as_bits(lower + up));
  }
  x *= as_float((uint32_t)(exponent - p->exponent_quantum));
  return p->negative_zero ? x : x + 0.0f;
}
