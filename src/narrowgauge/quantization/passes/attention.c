/* Causal attention of bf16 values on a CPU, forward and backward (kernels/attention_in_order.py calls it).

    z_ts = scale (q_t . k_s), s <= t     p_ts = exp(z_ts - m_t) / l_t     y_t = sum_s bf16(p_ts) v_s
    dp_ts = do_t . v_s     ds_ts = bf16(p_ts (dp_ts - do_t . y_t))
    dq_t = scale sum_s ds_ts k_s     dk_s = scale sum_t ds_ts q_t     dv_s = sum_t bf16(p_ts) do_t

Every product is one of two bf16 values, exact in float32, so that a fused multiply-add rounds as a product and a sum
do. Each sum adds in the order of its index; only those of a row (l_t, do_t . y_t) have 16 lanes, which are added
pairwise at the end. So the digits depend on no vector width, number of threads or tile.

A unit of work is the query heads that share a key-value head, of one sequence. Its keys and values are held as
float32, its scores for ROWS queries at a time. */

#include "bf16.h"

/* A vector of W floats, which a compiler maps to the registers of the machine; MR rows of a tile fill them. */
#if defined(__AVX512F__)
#define W 16
#define MR 8
#elif defined(__AVX__)
#define W 8
#define MR 4
#else
#define W 4
#define MR 8
#endif
typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
#define AT(p) (*(vec *)(p))

#define ROWS 8
#define LANES 16
typedef struct {
  const uint16_t *q, *k, *v, *out, *grad; /* bf16; (batch, head, token) strides, elements of a head contiguous */
  uint16_t *y, *dq, *dk, *dv;
  float *stats; /* m and l of each row: (batch, heads, tokens, 2) */
  int64_t batch, heads, kv_heads, tokens, dim;
  int64_t q_strides[3], k_strides[3], v_strides[3], out_strides[3], grad_strides[3];
  int64_t y_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
  float scale;
} Attention;

/* e^x for x <= 0, 0 below -87: 2^n times a polynomial of the rest (Cephes, expf). */
INLINE float exponential(float x) {
  float under = x < -87.0f ? 0.0f : 1.0f, bounded = x < -87.0f ? -87.0f : x;
  float shifted = bounded * 1.44269504088896341f + 12582912.0f, n = shifted - 12582912.0f;
  float r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return p * as_float((as_bits(shifted) + 127u) << 23) * under;
}

/* e^(scale z - m) of the n scores of a row, and zeros up to `padded`. */
static void exponentials(float *RESTRICT z, int64_t n, int64_t padded, float scale, float m) {
  for (int64_t s = 0; s < padded; s++) {
    float e = exponential(z[s] * scale - m);
    z[s] = s < n ? e : 0.0f;
  }
}

/* From here on every product that is added to something is exact, so that both may be one instruction. */
#pragma GCC optimize("fp-contract=fast")

/* Rows of bf16 as float32. */
static void widen(const uint16_t *RESTRICT from, int64_t stride, int64_t rows, int64_t dim, float *RESTRICT to) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < dim; h++) to[t * dim + h] = wide(from[t * stride + h]);
}

/* The same, transposed: [dim, padded]. */
static void widen_across(const float *RESTRICT from, int64_t rows, int64_t dim, int64_t padded, float *RESTRICT to) {
  for (int64_t s = 0; s < rows; s += 16)
    for (int64_t h = 0; h < dim; h++)
      for (int64_t i = s; i < s + 16 && i < rows; i++) to[h * padded + i] = from[i * dim + h];
}

static void narrow_rows(const float *RESTRICT from, float factor, int64_t stride, int64_t rows, int64_t dim, uint16_t *RESTRICT to) {
  for (int64_t t = 0; t < rows; t++)
    for (int64_t h = 0; h < dim; h++) to[t * stride + h] = narrow(from[t * dim + h] * factor);
}

/* c[r, 0 : nv W] (+)= sum over i < n of a[r, i] b[i, 0 : nv W], in the order of i; `rows`, `nv` and `adds` are
constants. An element of a lies at a[r * across + i * along]. */
INLINE void tile(int rows, int nv, int adds, int64_t n, const float *a, int64_t across, int64_t along, const float *b, int64_t ldb, float *c, int64_t ldc) {
#pragma STDC FP_CONTRACT ON
  vec sum[MR][2];
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < nv; j++) sum[r][j] = adds ? AT(c + r * ldc + j * W) : (vec){0};
  for (int64_t i = 0; i < n; i++)
    for (int r = 0; r < rows; r++)
      for (int j = 0; j < nv; j++) sum[r][j] = sum[r][j] + a[r * across + i * along] * AT(b + i * ldb + j * W);
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < nv; j++) AT(c + r * ldc + j * W) = sum[r][j];
}

/* The same for `rows`, a multiple of 8, and `columns`, one of 16. */
INLINE void product(int adds, int64_t rows, int64_t columns, int64_t n, const float *a, int64_t across, int64_t along, const float *b, int64_t ldb, float *c, int64_t ldc) {
  for (int64_t r = 0; r < rows; r += MR) {
    int64_t j = 0;
    for (; j + 2 * W <= columns; j += 2 * W) tile(MR, 2, adds, n, a + r * across, across, along, b + j, ldb, c + r * ldc + j, ldc);
    for (; j < columns; j += W) tile(MR, 1, adds, n, a + r * across, across, along, b + j, ldb, c + r * ldc + j, ldc);
  }
}

/* c = a b for ROWS rows of a. */
static void multiply(int64_t n, int64_t columns, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc) {
  product(0, ROWS, columns, n, a, lda, 1, b, ldb, c, ldc);
}

INLINE float pairwise(const float *lanes) {
  float half[LANES];
  memcpy(half, lanes, sizeof half);
  for (int n = LANES / 2; n; n /= 2)
    for (int i = 0; i < n; i++) half[i] = half[i] + half[i + n];
  return half[0];
}

static float row_dot(const float *x, const float *y, int64_t n) { /* y: null for ones; n: a multiple of LANES */
  float lanes[LANES] = {0};
  for (int64_t s = 0; s < n; s += LANES)
    for (int i = 0; i < LANES; i++) lanes[i] += y ? x[s + i] * y[s + i] : x[s + i];
  return pairwise(lanes);
}

static float row_max(const float *x, int64_t n) {
  float lanes[LANES];
  int64_t s = 0;
  for (int i = 0; i < LANES; i++) lanes[i] = x[0];
  for (; s + LANES <= n; s += LANES)
    for (int i = 0; i < LANES; i++) lanes[i] = x[s + i] > lanes[i] ? x[s + i] : lanes[i];
  for (; s < n; s++) lanes[0] = x[s] > lanes[0] ? x[s] : lanes[0];
  for (int i = 1; i < LANES; i++) lanes[0] = lanes[i] > lanes[0] ? lanes[i] : lanes[0];
  return lanes[0];
}

static int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

static const uint16_t *at(const uint16_t *x, const int64_t *strides, int64_t b, int64_t n, int64_t t) {
  return x + b * strides[0] + n * strides[1] + t * strides[2];
}

int64_t attention_units(const Attention *p) { return p->batch * p->kv_heads; }

static int64_t rows_at(const Attention *p, int64_t t) { return p->tokens - t < ROWS ? p->tokens - t : ROWS; }

int attention_forward(const Attention *p, int64_t first, int64_t last) {
  const int64_t T = p->tokens, H = p->dim, S = up(T + ROWS, 32), groups = p->heads / p->kv_heads;
  float *memory = calloc((size_t)(3 * S * H + ROWS * (S + 2 * H)), sizeof(float));
  if (!memory) return 1;
  float *keys = memory, *k = keys + S * H, *v = k + S * H, *z = v + S * H, *q = z + ROWS * S, *y = q + ROWS * H;
  for (int64_t unit = first; unit < last; unit++) {
    const int64_t b = unit / p->kv_heads, kv = unit % p->kv_heads;
    widen(at(p->k, p->k_strides, b, kv, 0), p->k_strides[2], T, H, keys);
    widen_across(keys, T, H, S, k);
    widen(at(p->v, p->v_strides, b, kv, 0), p->v_strides[2], T, H, v);
    for (int64_t n = kv * groups; n < (kv + 1) * groups; n++)
      for (int64_t t = 0; t < T; t += ROWS) {
        const int64_t rows = rows_at(p, t), seen = up(t + ROWS, 16);
        widen(at(p->q, p->q_strides, b, n, t), p->q_strides[2], rows, H, q);
        multiply(H, seen, q, H, k, S, z, S);
        for (int64_t r = 0; r < rows; r++) {
          float *row = z + r * S, *stats = p->stats + ((b * p->heads + n) * T + t + r) * 2;
          stats[0] = row_max(row, t + r + 1) * p->scale;
          exponentials(row, t + r + 1, seen, p->scale, stats[0]);
          stats[1] = 1.0f / row_dot(row, 0, seen);
          for (int64_t s = 0; s < seen; s++) row[s] = wide(narrow(row[s] * stats[1]));
        }
        multiply(t + rows, H, z, S, v, H, y, H);
        narrow_rows(y, 1.0f, p->y_strides[2], rows, H, (uint16_t *)at(p->y, p->y_strides, b, n, t));
      }
  }
  free(memory);
  return 0;
}

int attention_backward(const Attention *p, int64_t first, int64_t last) {
  const int64_t T = p->tokens, H = p->dim, S = up(T + ROWS, 32), groups = p->heads / p->kv_heads;
  float *memory = calloc((size_t)(6 * S * H + ROWS * (3 * S + 4 * H)), sizeof(float));
  if (!memory) return 1;
  float *k = memory, *kt = k + S * H, *vt = kt + S * H, *dk = vt + S * H, *dv = dk + S * H, *v = dv + S * H;
  float *p_fp32 = v + S * H, *p_bf16 = p_fp32 + ROWS * S, *ds = p_bf16 + ROWS * S;
  float *q = ds + ROWS * S, *grad = q + ROWS * H, *y = grad + ROWS * H, *dq = y + ROWS * H;
  for (int64_t unit = first; unit < last; unit++) {
    const int64_t b = unit / p->kv_heads, kv = unit % p->kv_heads;
    widen(at(p->k, p->k_strides, b, kv, 0), p->k_strides[2], T, H, k);
    widen_across(k, T, H, S, kt);
    widen(at(p->v, p->v_strides, b, kv, 0), p->v_strides[2], T, H, v);
    widen_across(v, T, H, S, vt);
    memset(dk, 0, (size_t)(2 * S * H) * sizeof(float)); /* and dv */
    for (int64_t n = kv * groups; n < (kv + 1) * groups; n++)
      for (int64_t t = 0; t < T; t += ROWS) {
        const int64_t rows = rows_at(p, t), seen = up(t + ROWS, 16);
        if (rows < ROWS) memset(q, 0, (size_t)(3 * ROWS * H) * sizeof(float)); /* and grad, y */
        widen(at(p->q, p->q_strides, b, n, t), p->q_strides[2], rows, H, q);
        widen(at(p->grad, p->grad_strides, b, n, t), p->grad_strides[2], rows, H, grad);
        widen(at(p->out, p->out_strides, b, n, t), p->out_strides[2], rows, H, y);
        multiply(H, seen, q, H, kt, S, p_fp32, S);
        multiply(H, seen, grad, H, vt, S, ds, S);
        for (int64_t r = 0; r < ROWS; r++) {
          float *RESTRICT of = p_fp32 + r * S, *RESTRICT low = p_bf16 + r * S, *RESTRICT d = ds + r * S;
          if (r >= rows) {
            memset(low, 0, (size_t)seen * sizeof(float));
            memset(d, 0, (size_t)seen * sizeof(float));
            continue;
          }
          const float *stats = p->stats + ((b * p->heads + n) * T + t + r) * 2;
          const float inverse = stats[1], delta = row_dot(grad + r * H, y + r * H, H);
          exponentials(of, t + r + 1, seen, p->scale, stats[0]);
          for (int64_t s = 0; s < seen; s++) {
            float probability = of[s] * inverse;
            low[s] = wide(narrow(probability));
            d[s] = wide(narrow(probability * (d[s] - delta)));
          }
        }
        multiply(t + rows, H, ds, S, k, H, dq, H);
        narrow_rows(dq, p->scale, p->dq_strides[2], rows, H, (uint16_t *)at(p->dq, p->dq_strides, b, n, t));
        product(1, up(t + rows, 8), H, ROWS, ds, 1, S, q, H, dk, H);
        product(1, up(t + rows, 8), H, ROWS, p_bf16, 1, S, grad, H, dv, H);
      }
    narrow_rows(dk, p->scale, p->dk_strides[2], T, H, (uint16_t *)at(p->dk, p->dk_strides, b, kv, 0));
    narrow_rows(dv, 1.0f, p->dv_strides[2], T, H, (uint16_t *)at(p->dv, p->dv_strides, b, kv, 0));
  }
  free(memory);
  return 0;
}
