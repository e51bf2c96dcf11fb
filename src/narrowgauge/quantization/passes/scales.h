/* The scales of blocks from their amaxes: quantization/scales.py, operation for operation. */

INLINE float power_of_two(int32_t code) { return as_float(code == 0 ? 0x400000u : (uint32_t)code << 23); }

INLINE int32_t e8m0_code(const Cast *s, float amax, int rule) {
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
INLINE float outer_scale(const Cast *s, float over, int rule, float *encode) {
  const float scale = over / s->largest;
  if (rule != NVFP4) return over == 0 ? 1.0f : scale;
  const float of_over = s->largest / over, usual = of_over > FLOAT_MAX ? FLOAT_MAX : of_over;
  const float S = over == 0 ? 1.0f : usual == 0 ? 1.0f : usual, under = S < FLOAT_MAX ? scale : 1.0f / S;
  *encode = S;
  return over == 0 ? 1.0f : usual == 0 ? 1.0f : under;
}

INLINE float to_bf16(float x) { return wide(narrow(x > 0x1.fep127f ? 0x1.fep127f : x)); }

/* `over`, `above`, `S`: the amax that lies above the block's, its scale, and the inverse of that; `stretch` is 0
without candidates. */
INLINE void scale_of(const Cast *s, float amax, int rule, float stretch, int has_over, float over, float above, float S, float *encode, float *block) {
  if (rule == NVFP4) {
    const float quotient = stretch != 0 ? amax / s->aim * S * stretch : amax * (S * s->factor);
    const float scale = rounded(&s->scale, quotient, NEAREST_EVEN, 24, 0);
    *block = scale == 0 ? s->instead : scale;
    const float e = 1.0f / (*block * (1.0f / S));
    const float finite = e > FLOAT_MAX ? FLOAT_MAX : e, of_zero = s->zeros ? 0.0f : finite;
    *encode = scale == 0 ? of_zero : finite;
  } else if (rule == ROUNDED) {
    float quotient = amax / s->aim;
    if (has_over) quotient = over == 0 ? 0.0f : (float)((double)amax * s->target / (double)over);
    quotient = stretch != 0 ? quotient * stretch : quotient;
    const float scale = s->to_bf16 ? to_bf16(quotient) : rounded(&s->scale, quotient, NEAREST_EVEN, 24, 0);
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

INLINE void scales_by(const Narrow *p, const Unit *u, float stretch, int rule, int has_over, int over_each, Scales *to) {
  const Cast s = *p->cast; /* a copy that no store can change */
  const float *RESTRICT overs = p->over + (over_each ? u->entry : 0);
  float tensor_S = 1, tensor_over = 1, tensor_scale = 1;
  if (has_over && !over_each) {
    tensor_over = *overs;
    tensor_scale = outer_scale(&s, tensor_over, rule, &tensor_S);
  }
  for (int32_t k = 0; k < (int32_t)u->blocks; k++) {
    const float amax = to->amax[k];
    const int is_finite = amax <= FLOAT_MAX;
    const float over = over_each ? overs[k] : tensor_over;
    float encode, block, S = tensor_S;
    const float above = over_each ? outer_scale(&s, over, rule, &S) : tensor_scale;
    scale_of(&s, is_finite ? amax : 0.0f, rule, stretch, has_over, over, above, S, &encode, &block);
    to->above[k] = above;
    to->encode[k] = encode;
    to->block[k] = is_finite ? block : as_float(0x7FC00000u);
    to->finite[k] = is_finite ? 1.0f : 0.0f;
  }
}

/* The scales of a unit's blocks from their amaxes. */
static void find_scales(const Narrow *p, const Unit *u, float stretch, Scales *to) {
  switch (p->cast->rule) {
    case FLOOR: scales_by(p, u, 0, FLOOR, 0, 0, to); break;
    case CEIL: scales_by(p, u, 0, CEIL, 0, 0, to); break;
    case EVEN: scales_by(p, u, 0, EVEN, 0, 0, to); break;
    case RCEIL: scales_by(p, u, 0, RCEIL, 0, 0, to); break;
    case FP32: scales_by(p, u, 0, FP32, 0, 0, to); break;
    case NVFP4:
      if (p->over_each) scales_by(p, u, stretch, NVFP4, 1, 1, to);
      else scales_by(p, u, stretch, NVFP4, 1, 0, to);
      break;
    default:
      if (!p->over) scales_by(p, u, stretch, ROUNDED, 0, 0, to);
      else if (p->over_each) scales_by(p, u, stretch, ROUNDED, 1, 1, to);
      else scales_by(p, u, stretch, ROUNDED, 1, 0, to);
  }
}
