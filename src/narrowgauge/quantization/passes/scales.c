/* The scales of blocks from their amaxes, and codes by table, on a CPU (in_c.py calls them).

The arithmetic is that of quantization/scales.py, operation for operation. */

#include "passes.h"

enum { FLOOR, CEIL, EVEN, RCEIL, FP32, NVFP4, ROUNDED };

typedef struct {
  const float *amax; /* no value is negative */
  float *encode, *block;
  uint8_t *finite;
  const float *over; /* the amax of the tensor, or of each block's part of it; 0 without an outer scale */
  float *above;      /* the outer scale, one for each entry of `over` */
  Pass format; /* of rounded scales: only what `rounded` reads */
  int32_t rule, emax, half, keeps_power, zeros, over_each, to_bf16;
  float factor, largest, instead, aim, stretch; /* stretch: of a candidate, else 0 */
  double target;
} Scales;

#define INLINE static inline __attribute__((always_inline))
#define FLOAT_MAX 3.40282347e38f

INLINE float power_of_two(int32_t code) { return as_float(code == 0 ? 0x400000u : (uint32_t)code << 23); }

INLINE int32_t e8m0_code(const Scales *s, float amax, int rule) {
  if (rule == RCEIL) {
    const int32_t bits = (int32_t)as_bits(amax * s->factor), exponent = bits >> 23, mantissa = bits & 0x7FFFFF;
    return exponent + ((mantissa > 0) & (exponent < 254) & !((exponent == 0) & (mantissa <= 0x400000)));
  }
  const int is_subnormal = amax < 0x1p-126f;
  int32_t bits = (int32_t)as_bits(is_subnormal ? amax * 0x1p24f : amax);
  if (rule == EVEN) bits += s->half;
  int32_t exponent = (bits >> 23) - (is_subnormal ? 24 : 0);
  if (rule == CEIL) exponent += (bits & 0x7FFFFF) > 0;
  exponent -= s->emax;
  return exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
}

/* The outer scale for an amax, and in `encode` its inverse for NVFP4: S. Without branches, so that loops become
vector instructions. */
INLINE float outer_scale(const Scales *s, float over, int rule, float *encode) {
  const float scale = over / s->largest;
  if (rule != NVFP4) return over == 0 ? 1.0f : scale;
  const float of_over = s->largest / over, usual = of_over > FLOAT_MAX ? FLOAT_MAX : of_over;
  const float S = over == 0 ? 1.0f : usual == 0 ? 1.0f : usual, under = S < FLOAT_MAX ? scale : 1.0f / S;
  *encode = S;
  return over == 0 ? 1.0f : usual == 0 ? 1.0f : under;
}

INLINE float to_bf16(float x) {
  x = x > 0x1.fep127f ? 0x1.fep127f : x;
  const uint32_t bits = as_bits(x);
  return as_float((bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u);
}

/* `over`, `above`, `S`: the amax that lies above the block's, its scale, and the inverse of that. */
INLINE void scale_of(const Scales *s, float amax, int rule, int has_over, float over, float above, float S, float *encode, float *block) {
  if (rule == NVFP4) {
    const float quotient = s->stretch != 0 ? amax / s->aim * S * s->stretch : amax * (S * s->factor);
    const float scale = rounded(&s->format, quotient, NEAREST_EVEN, 0, 0);
    *block = scale == 0 ? s->instead : scale;
    const float e = 1.0f / (*block * (1.0f / S));
    const float finite = e > FLOAT_MAX ? FLOAT_MAX : e, of_zero = s->zeros ? 0.0f : finite;
    *encode = scale == 0 ? of_zero : finite;
  } else if (rule == ROUNDED) {
    float quotient = amax / s->aim;
    if (has_over) quotient = over == 0 ? 0.0f : (float)((double)amax * s->target / (double)over);
    quotient = s->stretch != 0 ? quotient * s->stretch : quotient;
    const float scale = s->to_bf16 ? to_bf16(quotient) : rounded(&s->format, quotient, NEAREST_EVEN, 0, 0);
    *block = scale == 0 ? s->instead : scale;
    const float divisor = has_over ? *block * above : *block, of_zero = s->zeros ? INFINITY : divisor;
    *encode = divisor == 0 ? INFINITY : scale == 0 ? of_zero : divisor;
  } else if (rule == FP32) {
    float e = s->factor / amax;
    e = e > FLOAT_MAX ? FLOAT_MAX : e;
    e = s->keeps_power ? as_float(as_bits(e) & 0x7F800000u) : e;
    *encode = amax == 0 ? 1.0f : e;
    *block = 1.0f / *encode;
  } else {
    const int32_t code = e8m0_code(s, amax, rule);
    *encode = power_of_two(254 - code);
    *block = power_of_two(code);
  }
}

INLINE void scales_by(const Scales *p, int64_t begin, int64_t end, int rule, int has_over, int over_each) {
  const Scales s = *p; /* a copy that no store can change */
  const float *RESTRICT amaxes = p->amax, *RESTRICT overs = p->over;
  float *RESTRICT encodes = p->encode, *RESTRICT blocks = p->block, *RESTRICT aboves = p->above;
  uint8_t *RESTRICT finites = p->finite;
  float tensor_S = 1, tensor_over = 1, tensor_scale = 1;
  if (has_over && !over_each) {
    tensor_over = *overs;
    tensor_scale = outer_scale(&s, tensor_over, rule, &tensor_S);
    if (begin == 0) *aboves = tensor_scale;
  }
  for (int64_t k = begin; k < end; k++) {
    const int is_finite = amaxes[k] <= FLOAT_MAX;
    const float over = over_each ? overs[k] : tensor_over;
    float encode, block, S = tensor_S;
    const float above = over_each ? outer_scale(&s, over, rule, &S) : tensor_scale;
    if (over_each) aboves[k] = above;
    scale_of(&s, is_finite ? amaxes[k] : 0.0f, rule, has_over, over, above, S, &encode, &block);
    encodes[k] = encode;
    blocks[k] = is_finite ? block : as_float(0x7FC00000u);
    finites[k] = (uint8_t)is_finite;
  }
}

/* Units: blocks. */
int scale_pass(const Scales *p, int64_t begin, int64_t end) {
  switch (p->rule) {
    case FLOOR: scales_by(p, begin, end, FLOOR, 0, 0); break;
    case CEIL: scales_by(p, begin, end, CEIL, 0, 0); break;
    case EVEN: scales_by(p, begin, end, EVEN, 0, 0); break;
    case RCEIL: scales_by(p, begin, end, RCEIL, 0, 0); break;
    case FP32: scales_by(p, begin, end, FP32, 0, 0); break;
    case NVFP4:
      if (p->over_each) scales_by(p, begin, end, NVFP4, 1, 1);
      else scales_by(p, begin, end, NVFP4, 1, 0);
      break;
    default:
      if (!p->over) scales_by(p, begin, end, ROUNDED, 0, 0);
      else if (p->over_each) scales_by(p, begin, end, ROUNDED, 1, 1);
      else scales_by(p, begin, end, ROUNDED, 1, 0);
  }
  return 0;
}

/* Units: blocks. The largest finite amax, into `encode`; the bits of finite values are ordered as the values are. */
int largest_pass(const Scales *p, int64_t begin, int64_t end) {
  const int32_t *amaxes = (const int32_t *)p->amax;
  int32_t most = 0;
  for (int64_t k = begin; k < end; k++) {
    const int32_t bits = amaxes[k] < 0x7F800000 ? amaxes[k] : 0;
    most = bits > most ? bits : most;
  }
  *p->encode = as_float((uint32_t)most);
  return 0;
}

typedef struct {
  const void *x, *table;
  void *out;
} Lookup;

/* Units: elements. The code of each bf16 value. */
int encode_pass(const Lookup *p, int64_t begin, int64_t end) {
  const uint16_t *RESTRICT x = p->x;
  const uint8_t *RESTRICT table = p->table;
  uint8_t *RESTRICT out = p->out;
  for (int64_t k = begin; k < end; k++) out[k] = table[x[k]];
  return 0;
}

/* Units: elements. The bf16 value of each code. */
int decode_pass(const Lookup *p, int64_t begin, int64_t end) {
  const uint8_t *RESTRICT x = p->x;
  const uint16_t *RESTRICT table = p->table;
  uint16_t *RESTRICT out = p->out;
  for (int64_t k = begin; k < end; k++) out[k] = table[x[k]];
  return 0;
}
