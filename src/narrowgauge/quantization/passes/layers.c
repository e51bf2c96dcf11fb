/* Rotary positions and RMSNorm on a CPU, around bf16 matmuls (kernels/heads.py and norm.py call it).

Each line does the operations of torch's plain code in its order, each rounded as there, so that the bits are the
same. Sums over a row or over tokens stay with torch, which adds in its order: a pass writes what is to be
summed, and another reads the sum. */

#include "bf16.h"

INLINE float rounded(float x) { return wide(narrow(x)); }

typedef struct {
  const uint16_t *x; /* bf16; (batch, head, token) strides, elements of a head contiguous */
  uint16_t *out;
  const float *cos, *sin; /* (batch, token) strides, elements contiguous */
  int64_t heads, tokens, half;
  int64_t x_strides[3], out_strides[3], table_strides[2];
  int32_t is_back;
} Rotary;

/* Units: heads of a sequence. Backward, torch rounds each product to the dtype of x, and then their sum. */
int rotary_pass(const Rotary *p, int64_t first, int64_t last) {
  const int64_t half = p->half;
  for (int64_t unit = first; unit < last; unit++) {
    const int64_t b = unit / p->heads, n = unit % p->heads;
    for (int64_t t = 0; t < p->tokens; t++) {
      const uint16_t *RESTRICT x = p->x + b * p->x_strides[0] + n * p->x_strides[1] + t * p->x_strides[2];
      uint16_t *RESTRICT y = p->out + b * p->out_strides[0] + n * p->out_strides[1] + t * p->out_strides[2];
      const float *RESTRICT cos = p->cos + b * p->table_strides[0] + t * p->table_strides[1];
      const float *RESTRICT sin = p->sin + b * p->table_strides[0] + t * p->table_strides[1];
      if (p->is_back)
        for (int64_t i = 0; i < half; i++) {
          const float low = wide(x[i]), high = wide(x[half + i]);
          y[i] = narrow(rounded(high * sin[i]) + rounded(low * cos[i]));
          y[half + i] = narrow(rounded(high * cos[i]) + rounded(-low * sin[i]));
        }
      else
        for (int64_t i = 0; i < half; i++) {
          const float low = wide(x[i]), high = wide(x[half + i]);
          y[i] = narrow(low * cos[i] - high * sin[i]);
          y[half + i] = narrow(high * cos[i] + low * sin[i]);
        }
    }
  }
  return 0;
}

typedef struct {
  const float *x, *weight, *scale, *slope, *above; /* above: the incoming gradient of the stream, or null */
  const uint16_t *delta, *dy;                      /* delta: null for none */
  float *stream, *first, *second;                  /* first, second: what torch sums */
  uint16_t *y;
  int64_t dim;
} Norm;

/* Units: tokens. stream = x + delta, first = stream^2; without a delta the stream is x. */
int norm_squares(const Norm *p, int64_t start, int64_t end) {
  const float *RESTRICT x = p->x;
  const uint16_t *RESTRICT delta = p->delta;
  float *RESTRICT stream = p->stream, *RESTRICT squares = p->first;
  for (int64_t i = start * p->dim; i < end * p->dim; i++) {
    const float s = delta ? x[i] + wide(delta[i]) : x[i];
    if (delta) stream[i] = s;
    squares[i] = s * s;
  }
  return 0;
}

/* y = x scale weight. */
int norm_result(const Norm *p, int64_t start, int64_t end) {
  for (int64_t t = start; t < end; t++) {
    const float *RESTRICT x = p->x + t * p->dim, *RESTRICT weight = p->weight, scale = p->scale[t];
    uint16_t *RESTRICT y = p->y + t * p->dim;
    for (int64_t i = 0; i < p->dim; i++) y[i] = narrow(x[i] * scale * weight[i]);
  }
  return 0;
}

/* first = dy x scale, the terms of dweight; second = dy weight x, of a row's sum. */
int norm_terms(const Norm *p, int64_t start, int64_t end) {
  for (int64_t t = start; t < end; t++) {
    const int64_t row = t * p->dim;
    const float *RESTRICT x = p->x + row, *RESTRICT weight = p->weight, scale = p->scale[t];
    const uint16_t *RESTRICT dy = p->dy + row;
    float *RESTRICT first = p->first + row, *RESTRICT second = p->second + row;
    for (int64_t i = 0; i < p->dim; i++) {
      const float gradient = wide(dy[i]);
      first[i] = gradient * (x[i] * scale);
      second[i] = gradient * weight[i] * x[i];
    }
  }
  return 0;
}

/* stream = (above + dy weight scale) + slope 2 x, and y is the same in bf16, unless null. */
int norm_gradient(const Norm *p, int64_t start, int64_t end) {
  for (int64_t t = start; t < end; t++) {
    const int64_t row = t * p->dim;
    const float *RESTRICT x = p->x + row, *RESTRICT weight = p->weight, scale = p->scale[t], slope = p->slope[t];
    const float *RESTRICT above = p->above ? p->above + row : 0;
    const uint16_t *RESTRICT dy = p->dy + row;
    float *RESTRICT dx = p->stream + row;
    uint16_t *RESTRICT ddelta = p->y ? p->y + row : 0;
    for (int64_t i = 0; i < p->dim; i++) {
      const float here = wide(dy[i]) * weight[i] * scale;
      dx[i] = (above ? above[i] + here : here) + slope * (x[i] * 2.0f);
      if (ddelta) ddelta[i] = narrow(dx[i]);
    }
  }
  return 0;
}
