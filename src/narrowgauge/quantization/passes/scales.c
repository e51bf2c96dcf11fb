/* The scales of blocks from their amaxes, and codes by table, on a CPU (in_c.py calls them).

The arithmetic is that of quantization/scales.py, operation for operation. */

#include "passes.h"

enum { FLOOR, CEIL, EVEN, RCEIL, FP32, NVFP4 };

typedef struct {
  const float *amax; /* no value is negative */
  float *encode, *block;
  uint8_t *finite;
  const float *over; /* the tensor's, for NVFP4 */
  float *above;      /* the tensor scale */
  Pass format; /* of NVFP4's scales: only what `rounded` reads */
  int32_t rule, emax, half, keeps_power, zeros;
  float factor, largest, instead;
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

/* `S`: the encoding scale of NVFP4's tensor. */
INLINE void scale_of(const Scales *s, float amax, int rule, float S, float *encode, float *block) {
  if (rule == NVFP4) {
    const float scale = rounded(&s->format, amax * (S * s->factor), NEAREST_EVEN, 0, 0);
    *block = scale == 0 ? s->instead : scale;
    const float e = 1.0f / (*block * (1.0f / S));
    *encode = scale == 0 && s->zeros ? 0.0f : e > FLOAT_MAX ? FLOAT_MAX : e;
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

INLINE void scales_by(const Scales *p, int64_t begin, int64_t end, int rule) {
  const Scales s = *p; /* a copy that no store can change */
  const float *RESTRICT amaxes = p->amax;
  float *RESTRICT encodes = p->encode, *RESTRICT blocks = p->block;
  uint8_t *RESTRICT finites = p->finite;
  float S = 1;
  if (rule == NVFP4) {
    const float over = *p->over, of_over = s.largest / over, usual = of_over > FLOAT_MAX ? FLOAT_MAX : of_over;
    const int is_usable = over != 0 && usual != 0;
    S = is_usable ? usual : 1.0f;
    if (begin == 0) *p->above = is_usable && S < FLOAT_MAX ? over / s.largest : 1.0f / S;
  }
  for (int64_t k = begin; k < end; k++) {
    const int is_finite = amaxes[k] <= FLOAT_MAX;
    float encode, block;
    scale_of(&s, is_finite ? amaxes[k] : 0.0f, rule, S, &encode, &block);
    encodes[k] = encode;
    blocks[k] = is_finite ? block : as_float(0x7FC00000u);
    finites[k] = (uint8_t)is_finite;
  }
}

/* Units: blocks. */
int scale_pass(const Scales *p, int64_t begin, int64_t end) {
  switch (p->rule) {
    case FLOOR: scales_by(p, begin, end, FLOOR); break;
    case CEIL: scales_by(p, begin, end, CEIL); break;
    case EVEN: scales_by(p, begin, end, EVEN); break;
    case RCEIL: scales_by(p, begin, end, RCEIL); break;
    case FP32: scales_by(p, begin, end, FP32); break;
    default: scales_by(p, begin, end, NVFP4);
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
