/* Quantization on a CPU: blocks, scales and elements of a split tensor, in one pass over memory (in_c.py calls it).

A split tensor is (batch, rows, columns) in memory, cut into blocks of (block_rows, block_columns). Arrays of
blocks are (batch, ceil(rows / block_rows), ceil(columns / block_columns)). A unit of work is one row of blocks
times a strip of columns; a caller may give units to any threads. While a unit lies in the cache, narrow_pass
finds the amaxes of its blocks, their scales (the best of several candidates) and its elements. What lies above
blocks, the scale of a tensor, needs all amaxes before: amax_pass.

The arithmetic is that of formats/rounding.py, formats/codes.py, formats/counter_rng.py, quantization/scales.py
and passes/in_torch.py, operation for operation: no product and sum may be contracted into one
(-ffp-contract=off), no order of a sum be changed. Elements are handled TILE at a time, by loops that a compiler
makes into vector instructions. */

#include "narrow.h"
#include "scales.h"

#define TILE 1024

static int64_t grid_columns(const Narrow *p) { return (p->columns + p->block_columns - 1) / p->block_columns; }
static int64_t grid_rows(const Narrow *p) { return (p->rows + p->block_rows - 1) / p->block_rows; }

static int64_t strip(const Narrow *p) {
  int64_t blocks = p->block_columns >= STRIP ? 1 : STRIP / p->block_columns;
  return blocks * p->block_columns;
}

static int64_t strips(const Narrow *p) { return (p->columns + strip(p) - 1) / strip(p); }

int units(const Narrow *p) { return (int)(p->batch * grid_rows(p) * strips(p)); }

static Unit unit_of(const Narrow *p, int64_t number) {
  Unit u;
  int64_t width = strip(p), across = strips(p), row = number / across;
  u.batch = row / grid_rows(p);
  u.first = number % across * width;
  u.last = u.first + width < p->columns ? u.first + width : p->columns;
  u.row0 = row % grid_rows(p) * p->block_rows;
  u.row1 = u.row0 + p->block_rows < p->rows ? u.row0 + p->block_rows : p->rows;
  u.blocks = (u.last - u.first + p->block_columns - 1) / p->block_columns;
  u.entry = p->is_one ? 0 : row * grid_columns(p) + u.first / p->block_columns; /* of its first block */
  return u;
}

INLINE int64_t index_of(const Narrow *p, const Unit *u, int64_t row, int64_t column) {
  return (u->batch * p->rows + row) * p->columns + column;
}

static void fill(float *RESTRICT to, float value, int64_t n) {
  for (int64_t k = 0; k < n; k++) to[k] = value;
}

/* What each of n columns has of its block, from an array of the unit's blocks: there, or written to `spare`. */
static const float *spread(const Narrow *p, const Unit *u, const float *of, int64_t column, int64_t n, float *spare) {
  const int64_t size = p->block_columns;
  const float *from = of + (column - u->first) / size;
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

/* n elements from `index` on as float32: in memory, or widened into `spare`. */
static const float *load(const Narrow *p, int64_t index, int64_t n, float *RESTRICT spare) {
  if (p->x_type == FLOAT32) return (const float *)p->x + index;
  const uint16_t *RESTRICT from = (const uint16_t *)p->x + index;
  for (int64_t k = 0; k < n; k++) spare[k] = wide(from[k]);
  return spare;
}

/* Elements in units of their blocks' scales. */
static void scale(const Narrow *p, int64_t n, const float *RESTRICT x, const float *RESTRICT encode, float *RESTRICT t) {
  if (p->divides)
    for (int64_t k = 0; k < n; k++) t[k] = x[k] / encode[k];
  else
    for (int64_t k = 0; k < n; k++) t[k] = x[k] * encode[k];
}

/* formats/counter_rng.py: the bits of element i of a stream are mix(mix(low(i) ^ k0) ^ high(i) * golden ^ k1). */
INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ x >> 16) * 0x21F0AAADu;
  x = (x ^ x >> 15) * 0xD35A2D97u;
  return x ^ x >> 15;
}

static void draw(const Narrow *p, int64_t index, int64_t n, float *RESTRICT uniform) {
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

static void round_all(const Narrow *p, int64_t index, int64_t n, float *RESTRICT t) {
  float uniform[TILE];
  const Grid grid = p->cast->element; /* a copy that no store can change */
  const int32_t count = (int32_t)n, bits = p->cast->random_bits;
  switch (p->cast->rounding) {
    case NEAREST_EVEN: for (int32_t k = 0; k < count; k++) t[k] = rounded(&grid, t[k], NEAREST_EVEN, 24, 0); break;
    case HALF_AWAY: for (int32_t k = 0; k < count; k++) t[k] = rounded(&grid, t[k], HALF_AWAY, 24, 0); break;
    case TOWARD_ZERO: for (int32_t k = 0; k < count; k++) t[k] = rounded(&grid, t[k], TOWARD_ZERO, 24, 0); break;
    default:
      draw(p, index, n, uniform);
      if (bits == 24)
        for (int32_t k = 0; k < count; k++) t[k] = rounded(&grid, t[k], STOCHASTIC, 24, uniform[k]);
      else
        for (int32_t k = 0; k < count; k++) t[k] = rounded(&grid, t[k], STOCHASTIC, bits, uniform[k]);
  }
}

static void store(const Narrow *p, int64_t index, int64_t n, const float *RESTRICT t) {
  if (p->out_type == FLOAT32) {
    memcpy((float *)p->out + index, t, n * sizeof(float));
    return;
  }
  uint16_t *RESTRICT to = (uint16_t *)p->out + index;
  for (int64_t k = 0; k < n; k++) to[k] = narrow(t[k]);
}

/* The codes of values on the grid: their quanta, after those of the binades below (formats/codes.py has the same). */
static void store_codes(const Narrow *p, int64_t index, int64_t n, const float *RESTRICT t, const float *RESTRICT finite) {
  const Grid format = p->cast->element; /* a copy that no store can change */
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

/* The bits of a magnitude, 16 for bf16. They are ordered as magnitudes are, and those of a NaN are the largest. */
INLINE int32_t magnitude(const Narrow *p, int64_t at, int is_half) {
  return is_half ? ((const uint16_t *)p->x)[at] & 0x7FFF : ((const int32_t *)p->x)[at] & 0x7FFFFFFF;
}

INLINE int32_t largest(const Narrow *p, int64_t index, int64_t n, int is_half) {
  uint16_t half = 0;
  int32_t most = 0;
  for (int64_t k = 0; k < n; k++) {
    const int32_t bits = magnitude(p, index + k, is_half);
    if (is_half) half = bits > half ? (uint16_t)bits : half;
    else most = bits > most ? bits : most;
  }
  return is_half ? half : most;
}

INLINE void amax_of(const Narrow *p, const Unit *u, int is_half, int32_t *RESTRICT most) {
  const int64_t size = p->block_columns, columns = u->last - u->first;
  for (int64_t row = u->row0; row < u->row1; row++) {
    const int64_t index = index_of(p, u, row, u->first);
    for (int64_t k = 0; size == 1 && k < columns; k++) { /* a vector of columns at a time */
      const int32_t bits = magnitude(p, index + k, is_half);
      most[k] = bits > most[k] ? bits : most[k];
    }
    for (int64_t b = 0; size > 1 && b < u->blocks; b++) {
      const int64_t at = index + b * size, left = columns - b * size, n = left < size ? left : size;
      const int32_t bits = n == 16 ? largest(p, at, 16, is_half) : largest(p, at, n, is_half);
      most[b] = bits > most[b] ? bits : most[b];
    }
  }
}

/* The largest magnitude of each block of a unit. */
static void amax_of_unit(const Narrow *p, const Unit *u, float *amax) {
  const int is_half = p->x_type == BFLOAT16;
  int32_t most[STRIP];
  memset(most, 0, u->blocks * sizeof(int32_t));
  if (is_half) amax_of(p, u, 1, most);
  else amax_of(p, u, 0, most);
  for (int64_t b = 0; b < u->blocks; b++) amax[b] = as_float((uint32_t)most[b] << 16 * is_half);
}

/* The largest magnitude of each block into `amax`. */
int amax_pass(const Narrow *p, int64_t begin, int64_t end) {
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    amax_of_unit(p, &u, p->amax + u.entry);
  }
  return 0;
}

/* Two errors of a block as one: their sum, or the larger, a NaN before all. */
INLINE float joined(int choose, float a, float b) {
  const uint32_t x = as_bits(a), y = as_bits(b);
  return choose == MAX ? as_float(x > y ? x : y) : a + b;
}

/* The n numbers that lie `stride` apart as one, half by half as long as that goes; they are overwritten. */
static float by_halves(int choose, float *v, int64_t n, int64_t stride) {
  while (n > 1 && n % 2 == 0) {
    n /= 2;
    for (int64_t k = 0; k < n; k++) v[k * stride] = joined(choose, v[k * stride], v[(k + n) * stride]);
  }
  float found = v[0];
  for (int64_t k = 1; k < n; k++) found = joined(choose, found, v[k * stride]);
  return found;
}

/* One number for a block of `e`, whose rows are `width` apart; what lies along the contraction comes first, in order. */
static float reduced(float *e, const Narrow *p, int64_t rows, int64_t width) {
  const int choose = p->cast->choose;
  if (!p->contracts_columns) return by_halves(choose, e, p->block_columns, 1); /* find_errors has joined the rows */
  for (int64_t row = 0; row < rows; row++) {
    float *of = e + row * width, found = of[0];
    for (int64_t k = 1; k < p->block_columns; k++) found = joined(choose, found, of[k]);
    of[0] = found;
  }
  return by_halves(choose, e, rows, width);
}

/* The errors of n numbers of a row: absolute, or squared. `above`: the outer scale, or under NVFP4 its amax. */
static void errors_of(const Narrow *p, int64_t n, const float *RESTRICT x, const float *RESTRICT block, const float *RESTRICT above, const float *RESTRICT t, float *RESTRICT e) {
  const float divisor = p->cast->rule == NVFP4 ? p->cast->largest : 1.0f;
  const int squares = p->cast->choose == MSE;
  for (int64_t k = 0; k < n; k++) {
    float seen = t[k] * block[k];
    seen = above ? seen * above[k] : seen;
    seen = seen / divisor;
    const float error = seen - x[k];
    e[k] = squares ? error * error : fabsf(error);
  }
}

/* The error of each block of a unit under its scale, by the choice, into `out`; `e` has room for the unit. */
static void find_errors(const Narrow *p, const Unit *u, const Scales *by, float *e, float *out) {
  float widened[TILE], t[TILE], spares[3][TILE], over[STRIP];
  const int64_t width = strip(p);
  const int is_nvfp4 = p->cast->rule == NVFP4, choose = p->cast->choose;
  if (is_nvfp4)
    for (int64_t b = 0; b < u->blocks; b++) over[b] = p->over[p->over_each ? u->entry + b : 0];
  for (int64_t column = u->first; column < u->last; column += TILE) {
    const int64_t n = u->last - column < TILE ? u->last - column : TILE;
    const float *encode = spread(p, u, by->encode, column, n, spares[0]);
    const float *block = spread(p, u, by->block, column, n, spares[1]);
    const float *above = p->over ? spread(p, u, is_nvfp4 ? over : by->above, column, n, spares[2]) : 0;
    for (int64_t row = u->row0; row < u->row1; row++) {
      const int64_t index = index_of(p, u, row, column);
      const float *x = load(p, index, n, widened);
      scale(p, n, x, encode, t);
      round_all(p, index, n, t);
      errors_of(p, n, x, block, above, t, e + (row - u->row0) * width + column - u->first);
    }
  }
  for (int64_t row = 1; !p->contracts_columns && row < u->row1 - u->row0; row++)
    for (int64_t k = 0; k < u->last - u->first; k++) e[k] = joined(choose, e[k], e[row * width + k]);
  if (p->block_columns == 1 && !p->contracts_columns) memcpy(out, e, u->blocks * sizeof(float));
  else
    for (int64_t b = 0; b < u->blocks; b++) out[b] = reduced(e + b * p->block_columns, p, u->row1 - u->row0, width);
}

/* The scales of a unit's blocks: for each block, of the candidate with the least error, which `sums` gets with SCALES. */
static void choose_scales(const Narrow *p, const Unit *u, Scales *best, float *e) {
  Scales tried;
  float least[STRIP], error[STRIP];
  find_scales(p, u, p->cast->stretch[0], best);
  find_errors(p, u, best, e, least);
  memcpy(tried.amax, best->amax, u->blocks * sizeof(float));
  for (int candidate = 1; candidate < p->cast->candidates; candidate++) {
    find_scales(p, u, p->cast->stretch[candidate], &tried);
    find_errors(p, u, &tried, e, error);
    for (int64_t b = 0; b < u->blocks; b++)
      if (error[b] < least[b]) {
        best->encode[b] = tried.encode[b];
        best->block[b] = tried.block[b];
        least[b] = error[b];
      }
  }
  if (p->result == SCALES && p->sums) memcpy(p->sums + u->entry, least, u->blocks * sizeof(float));
}

/* Sums over each block of a unit, one number after the other: of t^2 into `out`, of t q into `sums`; t in units of
the scale, q rounded, both 0 in a block that is not finite or whose scale is 0. */
static void add_projections(const Narrow *p, const Unit *u, const Scales *by) {
  float widened[TILE], t[TILE], q[TILE], encode_of[TILE];
  const int64_t size = p->block_columns, most = TILE / size * size;
  for (int64_t column = u->first; column < u->last; column += most) {
    const int64_t n = u->last - column < most ? u->last - column : most, first = (column - u->first) / size;
    const float *encode = spread(p, u, by->encode, column, n, encode_of);
    float *RESTRICT above = (float *)p->out + u->entry + first, *RESTRICT below = p->sums + u->entry + first;
    fill(above, -0.0f, (n + size - 1) / size); /* which changes no number that is added to it */
    fill(below, -0.0f, (n + size - 1) / size);
    for (int64_t row = u->row0; row < u->row1; row++) {
      const int64_t index = index_of(p, u, row, column);
      const float *x = load(p, index, n, widened);
      scale(p, n, x, encode, t);
      memcpy(q, t, n * sizeof(float));
      round_all(p, index, n, q);
      for (int64_t k = 0; k < n; k++) {
        q[k] = t[k] * q[k];
        t[k] = t[k] * t[k];
      }
      if (size == 1)
        for (int64_t k = 0; k < n; k++) above[k] = above[k] + t[k], below[k] = below[k] + q[k];
      else
        for (int64_t k = 0, b = 0; k < n; k += size, b++)
          for (int64_t i = k; i < k + size; i++) above[b] = above[b] + t[i], below[b] = below[b] + q[i];
    }
    for (int64_t k = 0; k < (n + size - 1) / size; k++)
      if (by->finite[first + k] == 0 || by->block[first + k] == 0) above[k] = below[k] = 0;
  }
}

/* Every element of a unit to its format's grid. */
static void round_unit(const Narrow *p, const Unit *u, const Scales *by) {
  float widened[TILE], t[TILE], encode_of[TILE], block_of[TILE];
  for (int64_t column = u->first; column < u->last; column += TILE) {
    const int64_t n = u->last - column < TILE ? u->last - column : TILE;
    const float *encode = spread(p, u, by->encode, column, n, encode_of), *block = 0;
    if (p->result != VALUES) block = spread(p, u, p->result == CODES ? by->finite : by->block, column, n, block_of);
    for (int64_t row = u->row0; row < u->row1; row++) {
      const int64_t index = index_of(p, u, row, column);
      const float *x = load(p, index, n, widened);
      scale(p, n, x, encode, t);
      round_all(p, index, n, t);
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

/* Amaxes, scales and elements of each block, except what is given. */
int narrow_pass(const Narrow *p, int64_t begin, int64_t end) {
  Scales by;
  const int chooses = p->cast->candidates && !p->is_given;
  float *e = chooses ? malloc((size_t)(p->block_rows * strip(p)) * sizeof(float)) : 0;
  if (chooses && !e) return 1;
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    const size_t size = (size_t)u.blocks * sizeof(float);
    if (p->is_given) {
      memcpy(by.encode, p->encode + u.entry, size);
      memcpy(by.block, p->block + u.entry, size);
      memcpy(by.finite, p->finite + u.entry, size);
    } else {
      if (p->amax) memcpy(by.amax, p->amax + u.entry, size);
      else amax_of_unit(p, &u, by.amax);
      if (chooses) choose_scales(p, &u, &by, e);
      else find_scales(p, &u, 0, &by);
      const int is_writer = !p->is_one || number == 0;
      if (p->encode && is_writer) memcpy(p->encode + u.entry, by.encode, size);
      if (p->block && is_writer) memcpy(p->block + u.entry, by.block, size);
      if (p->above && p->over_each) memcpy(p->above + u.entry, by.above, size);
      else if (p->above && number == 0) *p->above = by.above[0];
    }
    if (p->result == SUMS) add_projections(p, &u, &by);
    else if (p->result != SCALES) round_unit(p, &u, &by);
  }
  free(e);
  return 0;
}

/* The sum of the finite numbers of each column, float64, into `out`; every row is in one unit. */
int sum_pass(const Narrow *p, int64_t begin, int64_t end) {
  float widened[TILE];
  for (int64_t number = begin; number < end; number++) {
    const Unit u = unit_of(p, number);
    for (int64_t column = u.first; column < u.last; column += TILE) {
      const int64_t n = u.last - column < TILE ? u.last - column : TILE;
      double *RESTRICT sums = (double *)p->out + column;
      for (int64_t k = 0; k < n; k++) sums[k] = 0;
      for (int64_t row = u.row0; row < u.row1; row++) {
        const float *x = load(p, index_of(p, &u, row, column), n, widened);
        for (int64_t k = 0; k < n; k++) sums[k] += fabsf(x[k]) <= 3.40282347e38f ? x[k] : 0.0f;
      }
    }
  }
  return 0;
}

/* Units: elements. The bf16 value of each code. */
int decode_pass(const Narrow *p, int64_t begin, int64_t end) {
  const uint8_t *RESTRICT x = p->x;
  const uint16_t *RESTRICT table = p->table;
  uint16_t *RESTRICT out = p->out;
  for (int64_t k = begin; k < end; k++) out[k] = table[x[k]];
  return 0;
}

/* A pass that the threads of torch's OpenMP share: each calls `join_team` once. */
typedef int Pass(const void *one, int64_t start, int64_t end);

typedef struct {
  Pass *pass;
  const void *one;
  int64_t units, parts, taken; /* parts: equal ranges of units; taken: how many have an owner */
  int32_t failed;
} Team;

/* Compute parts until all are taken, so the team may have any size. */
void join_team(Team *team) {
  int64_t part;
  while ((part = __atomic_fetch_add(&team->taken, 1, __ATOMIC_RELAXED)) < team->parts) {
    const int64_t start = team->units * part / team->parts, end = team->units * (part + 1) / team->parts;
    if (team->pass(team->one, start, end)) __atomic_store_n(&team->failed, 1, __ATOMIC_RELAXED);
  }
}
