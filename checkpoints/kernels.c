// A decoder's layers on float32 rows, on processors with AVX2, with matrices of 16, 8 or 4 bits.
//
// A matrix of 16 bits lies in tiles: the weights of 16 outputs for one input, float16, behind those for the input
// before. One of 8 or 4 lies in blocks: the weights of 8 outputs for 32 neighbouring inputs, a group, whose weights
// share a scale.
//
//   8 bits  256 bytes, then 8 steps:             weight = step * level, -127 to 127
//   4 bits  128 bytes, then 8 steps and 8 lows:  weight = low + step * level, 0 to 15
//
// Steps and lows are float16. Of the levels, 32 bytes are 8 outputs times 4 inputs; of 4 bits, the low halves of 32
// bytes are inputs 4i to 4i+3, the high halves inputs 16+4i to 16+4i+3. Blocks of the same outputs follow each other.
//
// For 8 and 4 bits, a row is rounded to 15 bits in groups of 32, so that products of a group are sums of integers, the
// same in any order. (Rounded to 8 bits, rows would make a model write other texts: layer by layer, small differences
// become large ones.) Every sum of floats has one order: a row has the same bits whatever stands beside it, in any number
// of threads.

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 32, OUTPUTS = 8, QUADS = GROUP / 4, MOST_ROWS = 4, LARGEST = 127 << 7 };
enum { WIDE = 16, MOST_WIDE_ROWS = 6 };  // of 16 bits: outputs that lie together, and rows that are multiplied together
// So few numbers, weights and products are done before other threads would have begun.
enum { LANES = 8, FEW = 1 << 15, FEW_WEIGHTS = 1 << 17, FEW_PRODUCTS = 1 << 19 };

typedef struct {
  float step, sum;  // of a group of a row: value = step * level; the sum of all values
} Scale;

static inline float sum_of(__m256 values) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

static inline float largest_of(__m256 values) {
  __m128 most = _mm_max_ps(_mm256_castps256_ps128(values), _mm256_extractf128_ps(values, 1));
  most = _mm_max_ps(most, _mm_movehl_ps(most, most));
  return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

// `levels` are 15 bits and a sign.
static void round_row(const float *row, int width, int16_t *levels, Scale *scales) {
  const __m256 sign = _mm256_set1_ps(-0.0f), zero = _mm256_setzero_ps();
  for (int g = 0; g < width / GROUP; g++) {
    __m256 values[4], largest = zero, spoiled = zero;
    for (int i = 0; i < 4; i++) {
      values[i] = _mm256_loadu_ps(row + g * GROUP + 8 * i);
      largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, values[i]));
      spoiled = _mm256_fmadd_ps(values[i], zero, spoiled);  // no number, where a value is none or infinite
    }
    const float step = largest_of(largest) / LARGEST + sum_of(spoiled);
    const __m256 inverse = _mm256_set1_ps(step > 1e-37f ? 1 / step : 0);
    __m256i level[4];
    for (int i = 0; i < 4; i++) level[i] = _mm256_cvtps_epi32(_mm256_mul_ps(values[i], inverse));
    const __m256i sums = _mm256_add_epi32(_mm256_add_epi32(level[0], level[1]), _mm256_add_epi32(level[2], level[3]));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 1));
    scales[g] = (Scale){step, step * _mm_cvtsi128_si32(sum)};
    for (int i = 0; i < 4; i += 2) {
      const __m256i packed = _mm256_packs_epi32(level[i], level[i + 1]);  // takes turns between the halves of both
      _mm256_storeu_si256((__m256i *)(levels + g * GROUP + 8 * i), _mm256_permute4x64_epi64(packed, 0xd8));
    }
  }
}

// The sums and, of eight pairs of weights, the products with as many pairs of numbers.
static inline __m256i add_products(__m256i sums, __m256i weights, __m256i numbers) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sums, weights, numbers);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(weights, numbers));
#endif
}

// Adds the products of four inputs to the sums of a group, pairs of them side by side. `first` are the weights of 4
// outputs, `second` those of the other 4; `rows` are the inputs of the first row.
static inline __attribute__((always_inline)) void add_quads(int count, __m256i first, __m256i second,
                                                            const int16_t *rows, size_t width, __m256i (*sums)[2]) {
  for (int r = 0; r < count; r++) {
    int64_t quad;
    memcpy(&quad, rows + r * width, sizeof quad);
    const __m256i numbers = _mm256_set1_epi64x(quad);
    sums[r][0] = add_products(sums[r][0], first, numbers);
    sums[r][1] = add_products(sums[r][1], second, numbers);
    // Left alone, the compiler adds all products in the end, where registers are too few to hold them till then.
    __asm__("" : "+x"(sums[r][0]), "+x"(sums[r][1]));
  }
}

// The products of up to four rows with the weights of 8 outputs. `bits` and `rows` are constants where this is inlined.
static inline __attribute__((always_inline)) void multiply_block(int bits, int rows, const uint8_t *weights, int groups,
                                                                 const int16_t *levels, const Scale *scales, float *out,
                                                                 int stride, int left) {
  const size_t bytes = bits * GROUP * OUTPUTS / 8, block = bytes + 2 * OUTPUTS * (bits == 4 ? 2 : 1);
  __m256 found[MOST_ROWS];
  for (int r = 0; r < rows; r++) found[r] = _mm256_setzero_ps();
  for (int g = 0; g < groups; g++, weights += block) {
    for (size_t i = 0; i < block; i += 64) _mm_prefetch((const char *)weights + 8 * block + i, _MM_HINT_T0);
    const __m128i *halves = (const __m128i *)weights;  // of four inputs, the weights of four outputs
    const __m256 step = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(weights + bytes)));
    const int16_t *row = levels + g * GROUP;
    const size_t width = (size_t)groups * GROUP;
    __m256i sums[MOST_ROWS][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    for (int q = 0; q < (bits == 4 ? QUADS / 2 : QUADS); q++) {
      const __m128i one = _mm_loadu_si128(halves + 2 * q), other = _mm_loadu_si128(halves + 2 * q + 1);
      if (bits == 4) {
        const __m256i first = _mm256_cvtepu8_epi16(one), second = _mm256_cvtepu8_epi16(other);
        const __m256i mask = _mm256_set1_epi16(15);
        add_quads(rows, _mm256_and_si256(first, mask), _mm256_and_si256(second, mask), row + 4 * q, width, sums);
        add_quads(rows, _mm256_srli_epi16(first, 4), _mm256_srli_epi16(second, 4), row + GROUP / 2 + 4 * q, width,
                  sums);
      } else {
        add_quads(rows, _mm256_cvtepi8_epi16(one), _mm256_cvtepi8_epi16(other), row + 4 * q, width, sums);
      }
    }
    for (int r = 0; r < rows; r++) {
      const Scale scale = scales[r * (size_t)groups + g];
      const __m256 both = _mm256_mul_ps(step, _mm256_set1_ps(scale.step));
      const __m256i pairs = _mm256_hadd_epi32(sums[r][0], sums[r][1]);  // outputs 0, 1, 4, 5, 2, 3, 6, 7
      found[r] = _mm256_fmadd_ps(both, _mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pairs, 0xd8)), found[r]);
      if (bits == 4) {
        const __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(weights + bytes) + 1));
        found[r] = _mm256_fmadd_ps(low, _mm256_set1_ps(scale.sum), found[r]);
      }
    }
  }
  for (int r = 0; r < rows; r++) {
    float last[OUTPUTS], *place = out + r * (size_t)stride;
    _mm256_storeu_ps(left < OUTPUTS ? last : place, found[r]);
    for (int i = 0; left < OUTPUTS && i < left; i++) place[i] = last[i];
  }
}

#define MULTIPLY(rows)                                                   \
  if (bits == 4)                                                         \
    multiply_block(4, rows, own, groups, row, scale, to, outputs, left); \
  else                                                                   \
    multiply_block(8, rows, own, groups, row, scale, to, outputs, left)

// How many of so many rows the next pass over the weights takes: five are three and two, not four and one.
static inline int rows_of_pass(int left, int most) {
  const int passes = (left + most - 1) / most;
  return (left + passes - 1) / passes;
}

// The products of up to six rows with the tile of 16 outputs, or of one row with that of 32: so many sums are under way
// at once. Each has one order.
static inline __attribute__((always_inline)) void multiply_tile(int rows, int tiles, const uint16_t *weights, int width,
                                                                const float *row, float *out, int stride, int left) {
  __m256 found[MOST_WIDE_ROWS * 4];  // in registers, if all loops over them are unrolled
  const int parts = 2 * tiles, is_whole = left >= tiles * WIDE;
#pragma GCC unroll 24
  for (int i = 0; i < rows * parts; i++) found[i] = _mm256_setzero_ps();
  for (int k = 0; k < width; k++) {
    __m256 own[4];
#pragma GCC unroll 4
    for (int i = 0; i < parts; i++) {
      const uint16_t *place = weights + (size_t)WIDE * (k + i / 2 * (size_t)width) + LANES * (i % 2);
      own[i] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)place));
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m256 number = _mm256_broadcast_ss(row + r * (size_t)width + k);
#pragma GCC unroll 4
      for (int i = 0; i < parts; i++) found[r * parts + i] = _mm256_fmadd_ps(number, own[i], found[r * parts + i]);
    }
  }
  float last[MOST_WIDE_ROWS * 4 * LANES];
#pragma GCC unroll 24
  for (int i = 0; i < rows * parts; i++) {
    float *place = out + i / parts * (size_t)stride + LANES * (i % parts);
    _mm256_storeu_ps(is_whole ? place : last + LANES * i, found[i]);
  }
  for (int r = 0; r < rows && !is_whole; r++)
    memcpy(out + r * (size_t)stride, last + r * parts * LANES, left * sizeof *last);
}

static void multiply_halves(const float *rows, const uint16_t *weights, float *out, int count, int outputs, int width,
                            int threads) {
  const int tiles = (outputs + WIDE - 1) / WIDE, step = count == 1 ? 2 : 1;
  const int is_much = (size_t)outputs * width > FEW_WEIGHTS || count * (size_t)width * outputs > FEW_PRODUCTS;
#pragma omp parallel for num_threads(threads) if (is_much)
  for (int t = 0; t < tiles; t += step) {
    const uint16_t *own = weights + t * (size_t)WIDE * width;
    const int left = outputs - t * WIDE;
    for (int r = 0, together; r < count; r += together) {
      const float *row = rows + r * (size_t)width;
      float *to = out + r * (size_t)outputs + t * WIDE;
      switch (together = rows_of_pass(count - r, MOST_WIDE_ROWS)) {
        case 1:
          if (t + 1 < tiles)  // passes of one row are those of a single row
            multiply_tile(1, 2, own, width, row, to, outputs, left);
          else
            multiply_tile(1, 1, own, width, row, to, outputs, left);
          break;
        case 2: multiply_tile(2, 1, own, width, row, to, outputs, left); break;
        case 3: multiply_tile(3, 1, own, width, row, to, outputs, left); break;
        case 4: multiply_tile(4, 1, own, width, row, to, outputs, left); break;
        case 5: multiply_tile(5, 1, own, width, row, to, outputs, left); break;
        default: multiply_tile(6, 1, own, width, row, to, outputs, left);
      }
    }
  }
}

// `rows` (count, width) and `out` (count, outputs) are float32, one row behind the other; in 8 and 4 bits the width is
// whole groups. `weights` are the blocks or tiles of as many outputs, rounded up. Returns 1 where memory is missing.
int multiply_rows(const float *rows, const uint8_t *weights, float *out, int count, int outputs, int width, int bits,
                  int threads) {
  if (bits == 16) {
    multiply_halves(rows, (const uint16_t *)weights, out, count, outputs, width, threads);
    return 0;
  }
  const int groups = width / GROUP, tiles = (outputs + OUTPUTS - 1) / OUTPUTS;
  const size_t block = (bits == 4 ? 16 + 4 : 32 + 2) * OUTPUTS;
  const int is_much = (size_t)outputs * width > FEW_WEIGHTS || count * (size_t)width * outputs > FEW_PRODUCTS;
  int16_t *levels = malloc(((size_t)count * width + 1) * sizeof *levels);
  Scale *scales = malloc(((size_t)count * groups + 1) * sizeof *scales);
  if (levels && scales) {
#pragma omp parallel for num_threads(threads) if (count * (size_t)width > FEW)
    for (int r = 0; r < count; r++)
      round_row(rows + (size_t)r * width, width, levels + (size_t)r * width, scales + (size_t)r * groups);
#pragma omp parallel for num_threads(threads) if (is_much)
    for (int t = 0; t < tiles; t++) {
      const uint8_t *own = weights + (size_t)t * groups * block;
      const int left = outputs - t * OUTPUTS;
      for (int r = 0, together; r < count; r += together) {
        const int16_t *row = levels + (size_t)r * width;
        const Scale *scale = scales + (size_t)r * groups;
        float *to = out + (size_t)r * outputs + t * OUTPUTS;
        switch (together = rows_of_pass(count - r, MOST_ROWS)) {
          case 1: MULTIPLY(1); break;
          case 2: MULTIPLY(2); break;
          case 3: MULTIPLY(3); break;
          default: MULTIPLY(4);
        }
      }
    }
  }
  const int is_short = !levels || !scales;
  free(levels);
  free(scales);
  return is_short;
}

// The weights of some outputs, in 8 bits, one output's behind the other's. Returns 1 where there is no such output.
int pick_rows(const int64_t *places, const uint8_t *blocks, float *out, int count, int outputs, int width) {
  const int groups = width / GROUP, size = OUTPUTS * (GROUP + (int)sizeof(uint16_t));
  for (int r = 0; r < count; r++) {
    if (places[r] < 0 || places[r] >= outputs) return 1;
    const int lane = places[r] % OUTPUTS;
    const uint8_t *block = blocks + places[r] / OUTPUTS * groups * size;
    for (int g = 0; g < groups; g++, block += size) {
      const float step = _cvtsh_ss(((const uint16_t *)(block + OUTPUTS * GROUP))[lane]);
      for (int i = 0; i < GROUP; i++)
        out[(size_t)r * width + g * GROUP + i] = step * (int8_t)block[(i / 4 * OUTPUTS + lane) * 4 + i % 4];
    }
  }
  return 0;
}

// Low-rank updates of some rows: two matrices, `down` (inner, width) and `up` (outputs, inner).
typedef struct {
  const uint8_t *down, *up;  // NULL where there is none
  int32_t inner, down_bits, up_bits;
} Update;

// Adds what an update makes of `rows` (count, width) to `out`, at these `places` among its rows of `stride` numbers.
static int add_update(const float *rows, const Update *update, float *out, const int32_t *places, int count,
                      int outputs, int width, int stride, int threads) {
  const int inner = update->inner;
  if (!update->down || !count) return 0;
  float *between = malloc((size_t)count * (inner + outputs) * sizeof *between),
        *found = between + (size_t)count * inner;
  const int is_short = !between ||
                       multiply_rows(rows, update->down, between, count, inner, width, update->down_bits, threads) ||
                       multiply_rows(between, update->up, found, count, outputs, inner, update->up_bits, threads);
  for (int r = 0; r < count && !is_short; r++) {
    float *row = out + places[r] * (size_t)stride;
    for (int i = 0; i < outputs; i++) row[i] += found[r * (size_t)outputs + i];
  }
  free(between);
  return is_short;
}

// What stands around the matrices.

static inline void norm_row(const float *row, const float *factor, float *out, int width, float eps) {
  __m256 squares = _mm256_setzero_ps();
  for (int i = 0; i < width; i += LANES) {
    const __m256 values = _mm256_loadu_ps(row + i);
    squares = _mm256_fmadd_ps(values, values, squares);
  }
  const __m256 scale = _mm256_set1_ps(1 / sqrtf(sum_of(squares) / width + eps));
  for (int i = 0; i < width; i += LANES)
    _mm256_storeu_ps(out + i,
                     _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(row + i), scale), _mm256_loadu_ps(factor + i)));
}

// RMSNorm: `rows` and `out` (count, width), `factor` (width); the width is a multiple of 8.
void norm_rows(const float *rows, const float *factor, float *out, int count, int width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (count * (size_t)width > FEW)
  for (int r = 0; r < count; r++) norm_row(rows + r * (size_t)width, factor, out + r * (size_t)width, width, eps);
}

// Turns heads by rotary embeddings, in place: the first `heads` times `width` numbers of each row of `stride` numbers.
// `cosines` and `sines` are (count, width), and the width, that of a head, is a multiple of 16. With `factors`, (heads,
// width), each head is normed before.
void turn_heads(float *rows, const float *cosines, const float *sines, const float *factors, int count, int heads,
                int width, int stride, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (count * (size_t)stride > FEW)
  for (int r = 0; r < count; r++) {
    const float *cosine = cosines + r * (size_t)width, *sine = sines + r * (size_t)width;
    for (int h = 0; h < heads; h++) {
      float *head = rows + r * (size_t)stride + h * width, *half = head + width / 2;
      if (factors) norm_row(head, factors + h * width, head, width, eps);
      for (int i = 0; i < width / 2; i += LANES) {
        const __m256 first = _mm256_loadu_ps(head + i), second = _mm256_loadu_ps(half + i);
        const __m256 back = _mm256_mul_ps(second, _mm256_loadu_ps(sine + i));
        const __m256 on = _mm256_mul_ps(first, _mm256_loadu_ps(sine + width / 2 + i));
        _mm256_storeu_ps(head + i, _mm256_sub_ps(_mm256_mul_ps(first, _mm256_loadu_ps(cosine + i)), back));
        _mm256_storeu_ps(half + i, _mm256_add_ps(_mm256_mul_ps(second, _mm256_loadu_ps(cosine + width / 2 + i)), on));
      }
    }
  }
}

// e to the power of each number, within two units of the last place: 2 to the power of a whole number, times a
// polynomial for what is left, at most ln(2) / 2.
static inline __m256 exp_of(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-87.0f), _mm256_min_ps(_mm256_set1_ps(88.0f), x));  // what is no number stays so
  const __m256 whole =
      _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  x = _mm256_fnmadd_ps(whole, _mm256_set1_ps(0.693359375f), x);
  x = _mm256_fnmadd_ps(whole, _mm256_set1_ps(-2.12194440e-4f), x);
  static const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  __m256 found = _mm256_set1_ps(1.0f / 5040);
  for (int i = 0; i < 7; i++) found = _mm256_fmadd_ps(found, x, _mm256_set1_ps(terms[i]));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(found, _mm256_castsi256_ps(power));
}

// gate(first half) * second half of `rows` (count, 2 * width), into `out` (count, width), a multiple of 8. The gate is
// SiLU, x / (1 + exp(-x)), or GELU by its tanh, x / (1 + exp(-2 * sqrt(2 / pi) * (x + 0.044715 * x^3))).
void gate_rows(const float *rows, float *out, int count, int width, int is_gelu, int threads) {
#pragma omp parallel for num_threads(threads) if (count * (size_t)width > FEW)
  for (int r = 0; r < count; r++) {
    const float *gate = rows + r * 2 * (size_t)width, *up = gate + width;
    for (int i = 0; i < width; i += LANES) {
      const __m256 x = _mm256_loadu_ps(gate + i), one = _mm256_set1_ps(1);
      __m256 power = _mm256_sub_ps(_mm256_setzero_ps(), x);
      if (is_gelu) {
        const __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(x, x), _mm256_set1_ps(0.044715f), one);
        power = _mm256_mul_ps(_mm256_mul_ps(power, _mm256_set1_ps(1.59576912f)), cubic);
      }
      const __m256 share = _mm256_add_ps(one, exp_of(power));
      _mm256_storeu_ps(out + r * (size_t)width + i, _mm256_mul_ps(_mm256_div_ps(x, share), _mm256_loadu_ps(up + i)));
    }
  }
}

typedef struct {
  // How many numbers further the next one is, of rows, heads, sequences and slots.
  int64_t query_row, query_head, key_sequence, key_head, key, value_sequence, value_head, value;
} Strides;

static inline const float *place_of(const float *first, int64_t stride, const int32_t *places, int index) {
  return first + stride * (places ? places[index] : index);
}

// One head of one row: it sees `count` keys, those at `places` or the first ones. `scores` has room for whole eights.
static void attend(const float *query, const float *keys, const float *values, const int32_t *places, int count,
                   const Strides *strides, int width, float scaling, float *scores, float *out) {
  if (!count) {
    memset(out, 0, width * sizeof *out);
    return;
  }
  for (int k = 0; k < count; k += LANES) {
    __m256 dots[LANES];
    const float *own[LANES];
    for (int j = 0; j < LANES; j++) {
      dots[j] = _mm256_setzero_ps();
      own[j] = place_of(keys, strides->key, places, k + j < count ? k + j : count - 1);
    }
    for (int i = 0; i < width; i += LANES) {
      const __m256 part = _mm256_loadu_ps(query + i);
      for (int j = 0; j < LANES; j++) dots[j] = _mm256_fmadd_ps(part, _mm256_loadu_ps(own[j] + i), dots[j]);
    }
    for (int j = 0; j < LANES; j += 2) dots[j / 2] = _mm256_hadd_ps(dots[j], dots[j + 1]);
    const __m256 low = _mm256_hadd_ps(dots[0], dots[1]), high = _mm256_hadd_ps(dots[2], dots[3]);
    const __m256 sums = _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
    _mm256_storeu_ps(scores + k, _mm256_mul_ps(sums, _mm256_set1_ps(scaling)));
  }
  __m256 most = _mm256_loadu_ps(scores);  // behind the end, the last one again
  for (int k = LANES; k < count; k += LANES) most = _mm256_max_ps(most, _mm256_loadu_ps(scores + k));
  const __m256 largest = _mm256_set1_ps(largest_of(most));
  __m256 total = _mm256_setzero_ps();
  for (int k = 0; k < count; k += LANES) {
    _mm256_storeu_ps(scores + k, exp_of(_mm256_sub_ps(_mm256_loadu_ps(scores + k), largest)));
    for (int j = count; j < k + LANES; j++) scores[j] = 0;
    total = _mm256_add_ps(total, _mm256_loadu_ps(scores + k));
  }
  const __m256 share = _mm256_set1_ps(1 / sum_of(total));
  for (int i = 0; i < width; i += LANES * LANES) {
    const int left = (width - i) / LANES, parts = left < LANES ? left : LANES;
    __m256 found[LANES];
    for (int j = 0; j < LANES; j++) found[j] = _mm256_setzero_ps();
    for (int k = 0; k < count; k++) {
      const float *value = place_of(values, strides->value, places, k) + i;
      const __m256 weight = _mm256_set1_ps(scores[k]);
      if (parts == LANES)
        for (int j = 0; j < LANES; j++)
          found[j] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(value + LANES * j), found[j]);
      else
        for (int j = 0; j < parts; j++)
          found[j] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(value + LANES * j), found[j]);
    }
    for (int j = 0; j < parts; j++) _mm256_storeu_ps(out + i + LANES * j, _mm256_mul_ps(found[j], share));
  }
}

// Attention of rows, each by itself, as many of each sequence. Row r sees the keys at places ends[r] to ends[r + 1] - 1
// of `places`; without `places`, the first `longest` ones. `out` is (rows, heads, width), and the width is a multiple
// of 8. Returns 1 where memory is missing, else 0.
int attend_rows(const float *query, const float *keys, const float *values, const int32_t *places, const int32_t *ends,
                float *out, int rows, int of_each, int heads, int groups, int longest, int width,
                const Strides *strides, float scaling, int threads) {
  const size_t room = (size_t)(longest + LANES - 1) / LANES * LANES;
  float *scores = malloc((size_t)rows * heads * room * sizeof *scores);
  if (!scores) return 1;
#pragma omp parallel for num_threads(threads) if ((size_t)rows * heads * room * width > FEW)
  for (int each = 0; each < rows * heads; each++) {
    const int r = each / heads, h = each % heads, start = ends ? ends[r] : 0;
    attend(query + r * strides->query_row + h * strides->query_head,
           keys + r / of_each * strides->key_sequence + h / groups * strides->key_head,
           values + r / of_each * strides->value_sequence + h / groups * strides->value_head,
           places ? places + start : NULL, ends ? ends[r + 1] - start : longest, strides, width, scaling,
           scores + each * room, out + each * (size_t)width);
  }
  free(scores);
  return 0;
}

// A decoder layer: all but the attention itself, whose keys and values a cache keeps.
typedef struct {
  const uint8_t *weights[4];  // of queries, keys and values; of attention's output; of gate and up; of the MLP's output
  const float *biases[7];     // of each layer in these matrices; NULL where it has none
  const float *norms[4];      // before and behind attention, before and behind the MLP; NULL where there is none
  const float *head_norms;    // (queries + keys, head_width), NULL where there are none
  float eps[4], head_eps;
  int32_t bits[4], hidden, queries, keys, head_width, inner, is_gelu;
} Layer;

static void add_bias(float *out, const float *bias, int count, int outputs, int stride) {
  for (int r = 0; r < count && bias; r++)
    for (int i = 0; i < outputs; i++) out[r * (size_t)stride + i] += bias[i];
}

// What `parts` layers, from number `first` on, give of `rows` (count, width), side by side: `matrix` holds them all.
static int project(const Layer *layer, int matrix, const Update *updates, const int32_t *masks, int masked,
                   const float *rows, float *out, int count, int width, int first, const int *sizes, int parts,
                   int threads) {
  int stride = 0, place = 0;
  for (int i = 0; i < parts; i++) stride += sizes[i];
  int is_short = multiply_rows(rows, layer->weights[matrix], out, count, stride, width, layer->bits[matrix], threads);
  float *own = NULL;
  if (updates && masked && !is_short) {
    own = malloc((size_t)masked * width * sizeof *own);
    is_short = !own;
    for (int r = 0; r < masked && own; r++)
      memcpy(own + r * (size_t)width, rows + masks[r] * (size_t)width, width * sizeof *own);
  }
  for (int i = 0; i < parts && !is_short; place += sizes[i++]) {
    add_bias(out + place, layer->biases[first + i], count, sizes[i], stride);
    if (own)
      is_short = add_update(own, updates + first + i, out + place, masks, masked, sizes[i], width, stride, threads);
  }
  free(own);
  return is_short;
}

// The queries, keys and values of `rows` (count, hidden), turned, into `out` (count, (queries + 2 * keys) *
// head_width). `cosines` and `sines` are (count, head_width). `updates`, one for each layer, are of the rows at the
// places `masks`; NULL without. Returns 1 where memory is missing, else 0.
int begin_layer(const Layer *layer, const Update *updates, const int32_t *masks, int masked, const float *rows,
                const float *cosines, const float *sines, float *out, int count, int threads) {
  const int width = layer->head_width, hidden = layer->hidden, turned = layer->queries + layer->keys;
  const int sizes[] = {layer->queries * width, layer->keys * width, layer->keys * width};
  float *normed = malloc((size_t)count * hidden * sizeof *normed);
  int is_short = !normed;
  if (!is_short) {
    norm_rows(rows, layer->norms[0], normed, count, hidden, layer->eps[0], threads);
    is_short = project(layer, 0, updates, masks, masked, normed, out, count, hidden, 0, sizes, 3, threads);
  }
  if (!is_short)
    turn_heads(out, cosines, sines, layer->head_norms, count, turned, width, (turned + layer->keys) * width,
               layer->head_eps, threads);
  free(normed);
  return is_short;
}

// rows + norm(found), into `out`; all (count, width).
static void add_rows(const float *rows, float *found, const float *factor, float *out, int count, int width, float eps,
                     int threads) {
  if (factor) norm_rows(found, factor, found, count, width, eps, threads);
  for (size_t i = 0; i < count * (size_t)width; i++) out[i] = rows[i] + found[i];
}

// What a layer makes of its `rows` (count, hidden) and of what was `attended` (count, queries * head_width), into `out`
// (count, hidden). The others are those of `begin_layer`.
int end_layer(const Layer *layer, const Update *updates, const int32_t *masks, int masked, const float *rows,
              const float *attended, float *out, int count, int threads) {
  const int hidden = layer->hidden, inner = layer->inner, sizes[] = {inner, inner};
  const size_t wider = hidden > inner ? hidden : inner;
  float *found = malloc(count * (hidden + 2 * (size_t)inner + wider) * sizeof *found);
  if (!found) return 1;
  float *gates = found + (size_t)count * hidden, *normed = gates + (size_t)count * 2 * inner, *between = normed;
  int is_short = project(layer, 1, updates, masks, masked, attended, found, count, layer->queries * layer->head_width,
                         3, &hidden, 1, threads);
  if (!is_short) {
    add_rows(rows, found, layer->norms[1], out, count, hidden, layer->eps[1], threads);
    norm_rows(out, layer->norms[2], normed, count, hidden, layer->eps[2], threads);
    is_short = project(layer, 2, updates, masks, masked, normed, gates, count, hidden, 4, sizes, 2, threads);
  }
  if (!is_short) {
    gate_rows(gates, between, count, inner, layer->is_gelu, threads);
    is_short = project(layer, 3, updates, masks, masked, between, found, count, inner, 6, &hidden, 1, threads);
  }
  if (!is_short) add_rows(out, found, layer->norms[3], out, count, hidden, layer->eps[3], threads);
  free(found);
  return is_short;
}

// Where a cache holds keys and values, and what rows see of them.
typedef struct {
  float *keys, *values;
  const int64_t *slots;  // of each row, where its own go
  const int32_t *places, *ends;
  int64_t of_each, longest;
  float scaling;
  Strides strides;  // but for those of queries
} Memory;

// A whole layer, with the keys and values of its rows written where they go.
static int step_layer(const Layer *layer, const Update *updates, const int32_t *masks, int masked, const float *rows,
                      const float *cosines, const float *sines, const Memory *memory, float *out, int count,
                      int threads) {
  const int size = layer->head_width, keys = layer->keys, queries = layer->queries, width = (queries + 2 * keys) * size;
  float *turned = malloc((size_t)count * (width + queries * size) * sizeof *turned);
  if (!turned) return 1;
  float *attended = turned + (size_t)count * width;
  int is_short = begin_layer(layer, updates, masks, masked, rows, cosines, sines, turned, count, threads);
  Strides strides = memory->strides;
  strides.query_row = width, strides.query_head = size;
  for (int r = 0; r < count && !is_short; r++)
    for (int h = 0; h < keys; h++) {
      const int64_t sequence = r / memory->of_each, slot = memory->slots[r];
      const float *own = turned + r * (size_t)width + (queries + h) * size;
      memcpy(memory->keys + sequence * strides.key_sequence + h * strides.key_head + slot * strides.key, own,
             size * sizeof *own);
      memcpy(memory->values + sequence * strides.value_sequence + h * strides.value_head + slot * strides.value,
             own + keys * size, size * sizeof *own);
    }
  is_short =
      is_short ||
      attend_rows(turned, memory->keys, memory->values, memory->places, memory->ends, attended, count, memory->of_each,
                  queries, queries / keys, memory->longest, size, &strides, memory->scaling, threads) ||
      end_layer(layer, updates, masks, masked, rows, attended, out, count, threads);
  free(turned);
  return is_short;
}

// Layers one behind the other. Each has its own updates, memory and rows that it gives.
int step_layers(const Layer *const *layers, const Update *const *updates, const int32_t *masks, int masked,
                const float *rows, const float *cosines, const float *sines, const Memory *memories, float *const *out,
                int layer_count, int count, int threads) {
  for (int l = 0; l < layer_count; l++) {
    const int is_updated = updates[l] != NULL;
    if (step_layer(layers[l], updates[l], masks, is_updated ? masked : 0, l ? out[l - 1] : rows, cosines, sines,
                   memories + l, out[l], count, threads))
      return 1;
  }
  return 0;
}
