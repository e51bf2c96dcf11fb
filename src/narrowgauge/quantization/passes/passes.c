/* The passes of quantization over a split tensor on a CPU, each in one reading of memory (in_c.py calls them).

A split tensor is (batch, rows, columns) in memory, cut into blocks of (block_rows, block_columns). Arrays of
blocks are (batch, ceil(rows / block_rows), ceil(columns / block_columns)). A unit of work is one row of blocks
times a strip of columns; a caller may give units to any threads. Within a unit, TILE numbers at a time are
loaded, scaled, rounded and stored by loops that a compiler makes into vector instructions.

The arithmetic is that of formats/rounding.py, formats/codes.py and formats/counter_rng.py, operation for
operation: no product and sum may be contracted into one (-ffp-contract=off), no order of a sum be changed. */

#include "passes.h"

#define TILE 1024
#define STRIP 1024 /* columns of a unit, at least; whole blocks */

typedef struct { int64_t batch, grid_row, first, last, row0, row1; } Unit;

static int64_t grid_columns(const Pass *p) { return (p->columns + p->block_columns - 1) / p->block_columns; }
static int64_t grid_rows(const Pass *p) { return (p->rows + p->block_rows - 1) / p->block_rows; }

static int64_t strip(const Pass *p) {
  int64_t blocks = p->block_columns >= STRIP ? 1 : STRIP / p->block_columns;
  return blocks * p->block_columns;
}

static int64_t strips(const Pass *p) { return (p->columns + strip(p) - 1) / strip(p); }

int64_t units(const Pass *p) { return p->batch * grid_rows(p) * strips(p); }

static Unit unit_of(const Pass *p, int64_t number) {
  Unit u;
  int64_t width = strip(p), across = strips(p), row = number / across;
  u.batch = row / grid_rows(p);
  u.grid_row = row % grid_rows(p);
  u.first = number % across * width;
  u.last = u.first + width < p->columns ? u.first + width : p->columns;
  u.row0 = u.grid_row * p->block_rows;
  u.row1 = u.row0 + p->block_rows < p->rows ? u.row0 + p->block_rows : p->rows;
  return u;
}

/* The entry of an array of blocks at a column of a unit. */
static inline int64_t entry(const Pass *p, const Unit *u, int64_t column) {
  return (u->batch * grid_rows(p) + u->grid_row) * grid_columns(p) + column / p->block_columns;
}

static inline int64_t index_of(const Pass *p, const Unit *u, int64_t row, int64_t column) {
  return (u->batch * p->rows + row) * p->columns + column;
}

static void fill(float *RESTRICT to, float value, int64_t n) {
  for (int64_t k = 0; k < n; k++) to[k] = value;
}

/* What each of n columns has of an array of blocks: there, or written to `spare`. */
static const float *spread(const Pass *p, const Unit *u, const float *of, int64_t column, int64_t n, float *spare) {
  const float *from = of + entry(p, u, column);
  const int64_t size = p->block_columns;
  if (size == 1) return from;
  int64_t done = 0;
  if (column % size == 0 && size == 16)
    for (; done + 16 <= n; done += 16, from++) fill(spare + done, *from, 16);
  else if (column % size == 0 && size == 32)
    for (; done + 32 <= n; done += 32, from++) fill(spare + done, *from, 32);
  while (done < n) {
    int64_t left = size - (column + done) % size, some = left < n - done ? left : n - done;
    fill(spare + done, *from++, some);
    done += some;
  }
  return spare;
}

static void load(const Pass *p, int64_t index, int64_t n, float *RESTRICT x) {
  if (p->x_type == BFLOAT16) {
    const uint16_t *RESTRICT from = (const uint16_t *)p->x + index;
    for (int64_t k = 0; k < n; k++) x[k] = as_float((uint32_t)from[k] << 16);
  } else {
    memcpy(x, (const float *)p->x + index, n * sizeof(float));
  }
}

/* Elements in units of their blocks' scales. */
static void scale(const Pass *p, int64_t n, const float *RESTRICT x, const float *RESTRICT encode, float *RESTRICT t) {
  if (p->divides)
    for (int64_t k = 0; k < n; k++) t[k] = x[k] / encode[k];
  else
    for (int64_t k = 0; k < n; k++) t[k] = x[k] * encode[k];
}

/* formats/counter_rng.py: the bits of element i of a stream are mix(mix(low(i) ^ k0) ^ high(i) * golden ^ k1). */
static inline uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x21F0AAADu;
  x = (x ^ x >> 15) * 0xD35A2D97u;
  return x ^ x >> 15;
}

static void draw(const Pass *p, int64_t index, int64_t n, float *RESTRICT uniform) {
  if (p->uniform) {
    memcpy(uniform, p->uniform + index, n * sizeof(float));
    return;
  }
  for (int64_t done = 0; done < n;) {
    const uint64_t first = p->offset + (uint64_t)index + (uint64_t)done, ahead = ((uint64_t)1 << 32) - (uint32_t)first;
    const int64_t some = ahead < (uint64_t)(n - done) ? (int64_t)ahead : n - done; /* one upper word for all */
    const uint32_t low = (uint32_t)first, key = p->key[0], second = (uint32_t)(first >> 32) * 0x9E3779B9u ^ p->key[1];
    float *RESTRICT to = uniform + done;
    for (int32_t k = 0; k < (int32_t)some; k++)
      to[k] = (float)(int32_t)(mixed(mixed((low + (uint32_t)k) ^ key) ^ second) >> 8) * 0x1p-24f;
    done += some;
  }
}

static void round_all(const Pass *p, int64_t index, int64_t n, float *RESTRICT t, float *RESTRICT uniform) {
  const Pass format = *p; /* a copy that no store can change */
  const int32_t count = (int32_t)n;
  switch (p->rounding) {
    case NEAREST_EVEN: for (int32_t k = 0; k < count; k++) t[k] = rounded(&format, t[k], NEAREST_EVEN, 0, 0); break;
    case HALF_AWAY: for (int32_t k = 0; k < count; k++) t[k] = rounded(&format, t[k], HALF_AWAY, 0, 0); break;
    case TOWARD_ZERO: for (int32_t k = 0; k < count; k++) t[k] = rounded(&format, t[k], TOWARD_ZERO, 0, 0); break;
    default:
      draw(p, index, n, uniform);
      if (p->random_bits == 24)
        for (int32_t k = 0; k < count; k++) t[k] = rounded(&format, t[k], STOCHASTIC, 0, uniform[k]);
      else
        for (int32_t k = 0; k < count; k++) t[k] = rounded(&format, t[k], STOCHASTIC, 1, uniform[k]);
  }
}

static void store(const Pass *p, int64_t index, int64_t n, const float *RESTRICT t) {
  if (p->out_type == FLOAT32) {
    memcpy((float *)p->out + index, t, n * sizeof(float));
    return;
  }
  uint16_t *RESTRICT to = (uint16_t *)p->out + index;
  for (int64_t k = 0; k < n; k++) {
    const uint32_t bits = as_bits(t[k]), nearest = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    to[k] = (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : nearest);
  }
}

/* The codes of values on the grid: their quanta, after those of the binades below (formats/codes.py has the same). */
static void store_codes(const Pass *p, int64_t index, int64_t n, const float *RESTRICT t, const float *RESTRICT finite) {
  const Pass format = *p; /* a copy that no store can change */
  uint8_t *RESTRICT to = (uint8_t *)p->out + index;
  const int32_t shift = 23 - format.mantissa_bits, mask = (1 << format.bits) - 1;
  for (int64_t k = 0; k < n; k++) {
    const int32_t bits = (int32_t)as_bits(t[k]), sign = bits >> 31, field = bits & 0x7F800000;
    const int32_t exponent = field < format.exponent_min ? format.exponent_min : field;
    const float quanta = fabsf(t[k]) * as_float(format.exponent_inverse - (uint32_t)exponent);
    const int32_t body = ((exponent - format.exponent_min) >> shift) + (int32_t)(as_bits(quanta + 0x1p23f) & 0x7FFFFFu);
    const int32_t code = format.twos_complement ? (body ^ sign) - sign : body | (sign & 1 << (format.bits - 1));
    to[k] = (uint8_t)(finite[k] != 0 ? code & mask : 0);
  }
}

/* Every element to its format's grid; `block` is the scale of a block, under CODES whether it is finite. */
int round_pass(const Pass *p, int64_t begin, int64_t end) {
  float x[TILE], t[TILE], uniform[TILE], encode_of[TILE], block_of[TILE];
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    for (int64_t column = u.first; column < u.last; column += TILE) {
      const int64_t n = u.last - column < TILE ? u.last - column : TILE;
      const float *encode = spread(p, &u, p->encode, column, n, encode_of);
      const float *block = p->result == VALUES ? 0 : spread(p, &u, p->block, column, n, block_of);
      for (int64_t row = u.row0; row < u.row1; row++) {
        const int64_t index = index_of(p, &u, row, column);
        load(p, index, n, x);
        scale(p, n, x, encode, t);
        round_all(p, index, n, t, uniform);
        if (p->result == CODES) {
          store_codes(p, index, n, t, block);
          continue;
        }
        if (p->result == STORED)
          for (int64_t k = 0; k < n; k++) t[k] *= block[k];
        store(p, index, n, t);
      }
    }
  }
  return 0;
}

/* Magnitudes are ordered as their bits are, and a NaN's are the largest. */
static inline __attribute__((always_inline)) int32_t largest_half(const uint16_t *x, int64_t n) {
  uint16_t most = 0;
  for (int64_t k = 0; k < n; k++) {
    const uint16_t bits = x[k] & 0x7FFFu;
    most = bits > most ? bits : most;
  }
  return (int32_t)((uint32_t)most << 16);
}

static inline __attribute__((always_inline)) int32_t largest_word(const int32_t *x, int64_t n) {
  int32_t most = 0;
  for (int64_t k = 0; k < n; k++) {
    const int32_t bits = x[k] & 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most;
}

static int32_t largest_of(const Pass *p, int64_t index, int64_t n) {
  if (p->x_type == BFLOAT16) {
    const uint16_t *x = (const uint16_t *)p->x + index;
    return n == 16 ? largest_half(x, 16) : n == 32 ? largest_half(x, 32) : largest_half(x, n);
  }
  const int32_t *x = (const int32_t *)p->x + index;
  return n == 16 ? largest_word(x, 16) : n == 32 ? largest_word(x, 32) : largest_word(x, n);
}

static void amax_of_columns(const Pass *p, const Unit *u, int32_t *most) {
  for (int64_t row = u->row0; row < u->row1; row++) {
    const int64_t index = index_of(p, u, row, u->first), n = u->last - u->first;
    if (p->x_type == BFLOAT16) {
      const uint16_t *RESTRICT x = (const uint16_t *)p->x + index;
      for (int64_t k = 0; k < n; k++) {
        const int32_t bits = (int32_t)((uint32_t)(x[k] & 0x7FFFu) << 16);
        most[k] = bits > most[k] ? bits : most[k];
      }
    } else {
      const int32_t *RESTRICT x = (const int32_t *)p->x + index;
      for (int64_t k = 0; k < n; k++) {
        const int32_t bits = x[k] & 0x7FFFFFFF;
        most[k] = bits > most[k] ? bits : most[k];
      }
    }
  }
}

/* The largest magnitude of each block, into `out` (float32). */
int amax_pass(const Pass *p, int64_t begin, int64_t end) {
  const int64_t size = p->block_columns;
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    int32_t *most = (int32_t *)p->out + entry(p, &u, u.first);
    const int64_t blocks = (u.last - u.first + size - 1) / size;
    memset(most, 0, blocks * sizeof(int32_t));
    if (size == 1) {
      amax_of_columns(p, &u, most);
      continue;
    }
    for (int64_t row = u.row0; row < u.row1; row++) {
      const int64_t index = index_of(p, &u, row, u.first);
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t left = u.last - u.first - b * size;
        const int32_t found = largest_of(p, index + b * size, left < size ? left : size);
        most[b] = found > most[b] ? found : most[b];
      }
    }
  }
  return 0;
}

/* The sum of n numbers that lie `stride` apart, half by half as long as that goes; they are overwritten. */
static float sum_by_halves(float *v, int64_t n, int64_t stride) {
  while (n > 1 && n % 2 == 0) {
    n /= 2;
    for (int64_t k = 0; k < n; k++) v[k * stride] = v[k * stride] + v[(k + n) * stride];
  }
  float sum = v[0];
  for (int64_t k = 1; k < n; k++) sum = sum + v[k * stride];
  return sum;
}

static float largest_magnitude(const float *e, const Pass *p, int64_t rows, int64_t width) {
  uint32_t most = 0;
  for (int64_t row = 0; row < rows; row++)
    for (int64_t k = 0; k < p->block_columns; k++) {
      const uint32_t bits = as_bits(e[row * width + k]);
      most = bits > most ? bits : most;
    }
  return as_float(most);
}

/* One number for a block of `e`, whose rows are `width` apart: along the contraction one after the other. */
static float reduced(float *e, const Pass *p, int64_t rows, int64_t width) {
  if (p->choose == MAX) return largest_magnitude(e, p, rows, width);
  if (p->contracts_columns) {
    for (int64_t row = 0; row < rows; row++) {
      float *of = e + row * width, sum = of[0];
      for (int64_t k = 1; k < p->block_columns; k++) sum = sum + of[k];
      of[0] = sum;
    }
    return sum_by_halves(e, rows, width);
  }
  for (int64_t row = 1; row < rows; row++)
    for (int64_t k = 0; k < p->block_columns; k++) e[k] = e[k] + e[row * width + k];
  return sum_by_halves(e, p->block_columns, 1);
}

/* The errors of n numbers of a row: absolute, or squared. */
static void errors_of(const Pass *p, int64_t n, const float *RESTRICT x, const float *RESTRICT block, const float *RESTRICT above, const float *RESTRICT t, float *RESTRICT e) {
  const float divisor = p->divisor;
  const int squares = p->choose == MSE;
  for (int64_t k = 0; k < n; k++) {
    float seen = t[k] * block[k];
    seen = above ? seen * above[k] : seen;
    seen = seen / divisor;
    const float error = seen - x[k];
    e[k] = squares ? error * error : fabsf(error);
  }
}

/* The error of each block under its scale, by the choice, into `out` (float32). */
int error_pass(const Pass *p, int64_t begin, int64_t end) {
  float x[TILE], t[TILE], uniform[TILE], spares[3][TILE];
  const int64_t width = strip(p);
  float *e = malloc((size_t)(p->block_rows * width) * sizeof(float));
  if (!e) return 1;
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    for (int64_t column = u.first; column < u.last; column += TILE) {
      const int64_t n = u.last - column < TILE ? u.last - column : TILE;
      const float *encode = spread(p, &u, p->encode, column, n, spares[0]);
      const float *block = spread(p, &u, p->block, column, n, spares[1]);
      const float *above = p->above ? spread(p, &u, p->above, column, n, spares[2]) : 0;
      for (int64_t row = u.row0; row < u.row1; row++) {
        const int64_t index = index_of(p, &u, row, column);
        load(p, index, n, x);
        scale(p, n, x, encode, t);
        round_all(p, index, n, t, uniform);
        errors_of(p, n, x, block, above, t, e + (row - u.row0) * width + column - u.first);
      }
    }
    float *out = (float *)p->out + entry(p, &u, u.first);
    if (p->block_columns == 1 && !p->contracts_columns && p->choose != MAX) { /* a vector of columns at a time */
      for (int64_t row = 1; row < u.row1 - u.row0; row++)
        for (int64_t k = 0; k < u.last - u.first; k++) e[k] = e[k] + e[row * width + k];
      memcpy(out, e, (size_t)(u.last - u.first) * sizeof(float));
      continue;
    }
    for (int64_t k = 0; k < u.last - u.first; k += p->block_columns)
      out[k / p->block_columns] = reduced(e + k, p, u.row1 - u.row0, width);
  }
  free(e);
  return 0;
}

/* Sums over each block, one number after the other: of t^2 into `out`, of t q into `sums`; t in units of the
scale, q rounded, both 0 where `block` is. */
int projection_pass(const Pass *p, int64_t begin, int64_t end) {
  float x[TILE], t[TILE], q[TILE], uniform[TILE], encode_of[TILE];
  const int64_t size = p->block_columns;
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    for (int64_t column = u.first; column < u.last; column += TILE / size * size) {
      const int64_t most = TILE / size * size, n = u.last - column < most ? u.last - column : most;
      const float *encode = spread(p, &u, p->encode, column, n, encode_of);
      const int64_t first = entry(p, &u, column);
      float *RESTRICT above = (float *)p->out + first, *RESTRICT below = p->sums + first;
      for (int64_t row = u.row0; row < u.row1; row++) {
        const int64_t index = index_of(p, &u, row, column);
        load(p, index, n, x);
        scale(p, n, x, encode, t);
        memcpy(q, t, n * sizeof(float));
        round_all(p, index, n, q, uniform);
        for (int64_t k = 0; k < n; k++) {
          q[k] = t[k] * q[k];
          t[k] = t[k] * t[k];
        }
        if (size == 1 && row == u.row0) {
          memcpy(above, t, n * sizeof(float));
          memcpy(below, q, n * sizeof(float));
        } else if (size == 1) {
          for (int64_t k = 0; k < n; k++) above[k] = above[k] + t[k], below[k] = below[k] + q[k];
        } else {
          for (int64_t k = 0; k < n; k += size) {
            float a = t[k], b = q[k];
            for (int64_t i = 1; i < size; i++) a = a + t[k + i], b = b + q[k + i];
            above[k / size] = a;
            below[k / size] = b;
          }
        }
      }
      for (int64_t k = 0; k < (n + size - 1) / size; k++)
        if (p->block[first + k] == 0) above[k] = below[k] = 0;
    }
  }
  return 0;
}

/* The sum of the finite numbers of each column, float64, into `out`; every row is in one unit. */
int sum_pass(const Pass *p, int64_t begin, int64_t end) {
  float x[TILE];
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    for (int64_t column = u.first; column < u.last; column += TILE) {
      const int64_t n = u.last - column < TILE ? u.last - column : TILE;
      double *RESTRICT sums = (double *)p->out + column;
      for (int64_t k = 0; k < n; k++) sums[k] = 0;
      for (int64_t row = u.row0; row < u.row1; row++) {
        load(p, index_of(p, &u, row, column), n, x);
        for (int64_t k = 0; k < n; k++) sums[k] += fabsf(x[k]) <= 3.40282347e38f ? x[k] : 0.0f;
      }
    }
  }
  return 0;
}
