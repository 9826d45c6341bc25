// Products of rows with quantised weights on CPU, as an XLA FFI handler.
//
// KIND, a flag, is how the weights are stored: a name of quantised.py, which has
// the layout of a panel. A row is quantised too, once a product, in blocks of 32
// numbers to signed bytes, or to 16 bits. Their products are sums of integers,
// which are exact; the floats are one chain of fused multiply-adds over blocks in
// order. So a row's bits depend neither on how many rows a call has, nor on
// threads, nor on the instructions that LANES chooses.
#include "shared.h"

#if defined(__x86_64__) && LANES > 4
#include <immintrin.h>
#endif

// Where scales lie: a float16 after each 32 k; one of DEPTH k before them, which
// whole numbers after each 32 multiply; or a float32 of DEPTH k.
#define OWN 0
#define SUPER 1
#define GROUP 2
// MINS: whether there are minima, which lie after the scales. PARTS: of 32 k,
// with a scale each. ZERO: what is taken from a code.
#define STORED(depth, bits, scales, mins, parts, zero)                    \
  DEPTH = depth, BITS = bits, SCALES = scales, MINS = mins, PARTS = parts, \
  ZERO = zero
#define Q4_0 STORED(32, 4, OWN, 0, 1, 8)
#define Q4_1 STORED(32, 4, OWN, 1, 1, 0)
#define Q5_0 STORED(32, 5, OWN, 0, 1, 16)
#define Q5_1 STORED(32, 5, OWN, 1, 1, 0)
#define Q8_0 STORED(32, 8, OWN, 0, 1, 128)
#define Q2_K STORED(256, 2, SUPER, 1, 2, 0)
#define Q4_K STORED(256, 4, SUPER, 1, 1, 0)
#define Q5_K STORED(256, 5, SUPER, 1, 1, 0)
#define Q6_K STORED(256, 6, SUPER, 0, 2, 32)
#define U4_32 STORED(32, 4, GROUP, 1, 1, 0)
#define U4_64 STORED(64, 4, GROUP, 1, 1, 0)
#define U4_128 STORED(128, 4, GROUP, 1, 1, 0)
#define U8_32 STORED(32, 8, GROUP, 1, 1, 0)
#define U8_64 STORED(64, 8, GROUP, 1, 1, 0)
#define U8_128 STORED(128, 8, GROUP, 1, 1, 0)
#define NF4_64 STORED(64, 4, GROUP, 0, 1, 0)
enum { KIND };
// Whether a row of 16 bits is multiplied as such, by codes widened once for all
// rows; else, where an instruction sums products of bytes, as two bytes, whose
// sums take twice the registers.
#if (LANES == 16 && defined(__AVX512BW__) && !defined(__AVX512VNNI__)) || \
    (LANES == 8 && defined(__AVX2__))
enum { WORDS = 1 };
#else
enum { WORDS = 0 };
#endif
// Codes of NF4_64 are places in a table of numbers from -1 to 1: 32512 times
// these and 32768, high bytes and low ones.
enum { TABLE = SCALES == GROUP && !MINS };
static const uint8_t NF4[2][16] = {
    {1, 39, 61, 77, 91, 104, 116, 128, 138, 148, 159, 170, 183, 199, 219, 255},
    {0, 149, 81, 216, 224, 137, 112, 0, 27, 112, 66, 234, 248, 116, 209, 0}};

// Bytes of a panel are read in this order. HEAD: scales of a block of DEPTH k.
// Of each 32 k: CODES, of which quads of k lie side by side, column by column;
// then LAST, what they are multiplied by.
// MOST: rows whose sums fit in the registers, for STRIP vectors at a time; of
// 16 bits, where those have two sums, half as many.
// AHEAD: bytes between a prefetch and its use.
enum {
  HEAD = (SCALES == OWN ? 0 : SCALES == SUPER ? 2 : 4) * (1 + MINS) * WIDE,
  CODES = 4 * BITS * WIDE,
  HIGH = BITS % 4,
  LAST = SCALES == OWN ? 2 * (1 + MINS) * WIDE
         : SCALES == SUPER ? PARTS * (1 + MINS) * WIDE : 0,
  PART = CODES + LAST,
  BLOCK = HEAD + DEPTH / 32 * PART,
  MOST = LANES == 16 ? 12 : LANES == 8 ? 6 : 3,
  HALF = WORDS ? MOST : (MOST + 1) / 2,
  STRIP = 2,
  AHEAD = 4096,
  TIMES = TABLE ? 2 : PARTS  // that a column's sums are begun
};
typedef uint8_t Bytes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Words __attribute__((vector_size(4 * LANES), aligned(4)));

// ---- Instructions -----------------------------------------------------------

// sum + the dot products of quads of codes with the quad of a row that x repeats.
// Without VNNI, pairs are first added in 16 bits: bytes must be halved for it.
INLINE Int dot(Int sum, Bytes w, Int x) {
#if LANES == 16 && defined(__AVX512VNNI__)
  return (Int)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif LANES == 16 && defined(__AVX512BW__)
#define PAIRS(w) _mm512_maddubs_epi16((__m512i)(w), (__m512i)x)
#define SUMS(n, w) (Int)_mm512_madd_epi16(PAIRS(w), _mm512_set1_epi16(n))
#elif LANES == 8 && defined(__AVXVNNI__)
  return (Int)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif LANES == 8 && defined(__AVX2__)
#define PAIRS(w) _mm256_maddubs_epi16((__m256i)(w), (__m256i)x)
#define SUMS(n, w) (Int)_mm256_madd_epi16(PAIRS(w), _mm256_set1_epi16(n))
#else
  for (int i = 0; i < 32; i += 8)
    sum += ((Int)w >> i & 255) * (x << (24 - i) >> 24);
  return sum;
#endif
#ifdef SUMS
  if (BITS == 8 || TABLE) return sum + SUMS(1, w & 15) + SUMS(16, w >> 4);
  return sum + SUMS(1, w);
#endif
}

// sum + the dot products of pairs of codes with the pair of a row that x repeats.
INLINE Int dot_words(Int sum, Words w, Int x) {
#if LANES == 16 && defined(__AVX512BW__)
  return sum + (Int)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif LANES == 8 && defined(__AVXVNNI__)
  return (Int)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
#elif LANES == 8 && defined(__AVX2__)
  return sum + (Int)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#else
  return sum;
#endif
}

// a * b + c, rounded once.
INLINE Vec fused(Vec a, Vec b, Vec c) {
#if LANES == 16
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  for (int i = 0; i < LANES; i++) c[i] = fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// LANES numbers of 16 bits. Those that are subnormal there are not here: a
// processor may be set to take subnormal numbers for zero.
INLINE Vec halfs(const uint8_t* p) {
#if LANES == 16
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const void*)p));
#elif LANES == 8 && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const void*)p));
#else
  typedef uint16_t Half __attribute__((vector_size(2 * LANES), aligned(2)));
  const Int u = __builtin_convertvector(*(const Half*)p, Int);
  const Int size = (u & 0x7fff) << 13, sign = (u & 0x8000) << 16;
  const Vec tiny = (Vec)(size + (113 << 23)) - 0x1p-14f;
  const Int x = (Int)choose(size < 1 << 23, tiny, (Vec)(size + (112 << 23)));
  return (Vec)(x | sign);
#endif
}

// LANES whole numbers of 8 bits. gcc 12 would convert vectors of them one by one.
INLINE Vec small(const uint8_t* p, bool sign) {
#if LANES == 16
  const __m128i x = _mm_loadu_si128((const void*)p);
  const __m512i n = sign ? _mm512_cvtepi8_epi32(x) : _mm512_cvtepu8_epi32(x);
  return (Vec)_mm512_cvtepi32_ps(n);
#elif LANES == 8 && defined(__AVX2__)
  const __m128i x = _mm_loadl_epi64((const void*)p);
  const __m256i n = sign ? _mm256_cvtepi8_epi32(x) : _mm256_cvtepu8_epi32(x);
  return (Vec)_mm256_cvtepi32_ps(n);
#else
  Vec n;
  for (int i = 0; i < LANES; i++) n[i] = sign ? (int8_t)p[i] : p[i];
  return n;
#endif
}

// The bytes of a table at these places.
INLINE Bytes found(const uint8_t* table, Bytes at) {
#if LANES == 16 && defined(__AVX512BW__)
  const __m512i t = _mm512_broadcast_i32x4(_mm_loadu_si128((const void*)table));
  return (Bytes)_mm512_shuffle_epi8(t, (__m512i)at);
#elif LANES == 8 && defined(__AVX2__)
  const __m128i t = _mm_loadu_si128((const void*)table);
  return (Bytes)_mm256_shuffle_epi8(_mm256_set_m128i(t, t), (__m256i)at);
#else
  for (int i = 0; i < 4 * LANES; i++) at[i] = table[at[i]];
  return at;
#endif
}

INLINE Int quad(const int8_t* p) {
  int32_t x;
  memcpy(&x, p, 4);
  return (Int){0} + x;
}

// ---- Rows -------------------------------------------------------------------

// Rows of a group lie so, for each 32 k and whatever KIND is: [rows, 32] high
// bytes, if they have 16 bits [rows, 32] low bytes, or else in one [rows, 32]
// WORDS, of every four k the second and third exchanged; then [rows] scales, and
// of the sums of all, of the first half and of the second [3, rows] of
// scale * sum and of -sum.
INLINE int64_t row_bytes(bool wide) { return wide ? 92 : 60; }

// Quantises 32 numbers of row m, to 127 or 127 * 256 steps up to the largest.
static void quantise(const float* x, bool wide, int64_t rows, int64_t m,
                     int8_t* group) {
  uint32_t bits = 0;
  for (int k = 0; k < 32; k++) {
    const uint32_t u = ((const uint32_t*)x)[k] & 0x7fffffff;
    bits = u > bits ? u : bits;
  }
  float most;
  memcpy(&most, &bits, 4);
  const float steps = wide ? 32512.0f : 127.0f;
  // Below, the quotient would be infinite. A NaN is passed on by the scale.
  const float inverse = most > 1e-30f ? steps / most : 0;
  int32_t sums[2] = {0}, q[32];
  for (int k = 0; k < 32; k++) q[k] = rintf(x[k] * inverse);
  for (int k = 0; k < 16; k++) sums[0] += q[k];
  for (int k = 16; k < 32; k++) sums[1] += q[k];
  int8_t *high = group + 32 * m, *low = group + 32 * (rows + m);
  if (wide && WORDS) {
    int16_t* word = (int16_t*)group + 32 * m;
    for (int k = 0; k < 32; k++) word[k] = q[k / 4 * 4 + k % 2 * 2 + k / 2 % 2];
  } else {
    for (int k = 0; k < 32; k++) high[k] = wide ? (q[k] + 128) >> 8 : q[k];
    if (wide)
      for (int k = 0; k < 32; k++) low[k] = q[k];
  }
  float* e = (float*)(group + rows * (wide ? 64 : 32)) + m;
  int32_t* less = (int32_t*)e + 4 * rows;
  const int32_t every[3] = {sums[0] + sums[1], sums[0], sums[1]};
  e[0] = most * (1 / steps);
  for (int i = 0; i < 3; i++) {
    e[(1 + i) * rows] = e[0] * every[i];
    less[i * rows] = -every[i];
  }
}

// ---- Products ---------------------------------------------------------------

// The codes of quad g of a column's 32 k, for vector v of the columns; of a table
// its high bytes in part 0, its low ones in part 1.
INLINE Bytes codes(const uint8_t* w, int g, int v, int part) {
  w += v * 4 * LANES;
  if (BITS == 8) return *(const Bytes*)(w + g * 4 * WIDE);
  if (BITS == 2) return *(const Bytes*)(w + g / 4 * 4 * WIDE) >> g % 4 * 2 & 3;
  const Bytes two = *(const Bytes*)(w + g % 4 * 4 * WIDE);
  const Bytes low = g < 4 ? two & 15 : two >> 4;
  if (TABLE) return found(NF4[part], low);
  if (!HIGH) return low;
  const Int more = *(const Int*)(w + (16 + g * HIGH / 8 * 4) * WIDE);
  const int at = g * HIGH % 8;  // They go to bit 4 of their bytes.
  const Int high = at < 4 ? more << (4 - at) : more >> (at - 4);
  return low | ((Bytes)high & (uint8_t)(16 * ((1 << HIGH) - 1)));
}

// Prefetches what belongs to a step of the STEPS over 32 k: memory works while the
// codes before are multiplied, where all at once would wait for it.
INLINE void fetch(const uint8_t* w, int step) {
  enum { LINES = (PART + 63) / 64, STEPS = VECTORS / STRIP * TIMES * 8 / PARTS };
  const int end = (step + 1) * LINES / STEPS;
  UNROLL for (int n = step * LINES / STEPS; n < end; n++)
    __builtin_prefetch(w + AHEAD + 64 * n);
}

// The dot products of a part with the rows: s[0] of their bytes or WORDS, or of
// their high bytes, and s[1] of the low ones. Codes are unpacked once for all.
INLINE void dots(int rows, bool wide, int part, const uint8_t* w, int v0,
                 const int8_t* q, Int s[][MOST][STRIP]) {
  UNROLL for (int i = 0; i < 8 / PARTS; i++) {
    const int g = PARTS == 1 ? i / 2 + i % 2 * 4 : 4 * part + i;
    Bytes u[STRIP];
    UNROLL for (int v = 0; v < STRIP; v++) u[v] = codes(w, g, v0 + v, part);
    fetch(w, (v0 / STRIP * TIMES + part) * (8 / PARTS) + i);
    if (wide && WORDS) {
      UNROLL for (int odd = 0; odd < 2; odd++) {
        Words two[STRIP];
        UNROLL for (int v = 0; v < STRIP; v++)
          two[v] = odd ? (Words)u[v] >> 8 : (Words)u[v] & 255;
        UNROLL for (int m = 0; m < rows; m++) {
          const Int x = quad(q + 64 * m + 8 * g + 4 * odd);
          UNROLL for (int v = 0; v < STRIP; v++)
            s[0][m][v] = dot_words(s[0][m][v], two[v], x);
        }
      }
      continue;
    }
    UNROLL for (int m = 0; m < rows; m++)
      UNROLL for (int low = 0; low <= wide; low++) {
        const Int x = quad(q + 32 * (low * rows + m) + 4 * g);
        UNROLL for (int v = 0; v < STRIP; v++)
          s[low][m][v] = dot(s[low][m][v], u[v], x);
      }
  }
}

// Scale and minimum of a part, for vector v of the columns.
INLINE void scales(const uint8_t* head, const uint8_t* last, int part, int v,
                   Vec* scale, Vec* least) {
  const int at = v * LANES;
  if (SCALES == GROUP) {
    *scale = *(const Vec*)(head + 4 * at);
    if (TABLE) *scale *= (part ? 1 : 256) / 32512.0f;
    if (MINS) *least = *(const Vec*)(head + 4 * WIDE + 4 * at);
    return;
  }
  *scale = halfs((SCALES == OWN ? last : head) + 2 * at);
  if (MINS) *least = halfs((SCALES == OWN ? last : head) + 2 * WIDE + 2 * at);
  if (SCALES == OWN) return;
  *scale *= small(last + part * WIDE + at, !MINS);
  if (MINS) *least *= small(last + (PARTS + part) * WIDE + at, false);
}

// sums += the products of 32 k of the panel at w with those of the rows at q.
INLINE void add_block(int rows, bool wide, const uint8_t* head,
                      const uint8_t* w, const int8_t* q, float* sums) {
  const float* e = (const float*)(q + rows * (wide ? 64 : 32));
  for (int v0 = 0; v0 < VECTORS; v0 += STRIP)
    UNROLL for (int part = 0; part < TIMES; part++) {
      const int zero = !TABLE ? ZERO : part ? 0 : 128;
      const bool two = wide && !WORDS;
      // Its own sums, after the rows' scales.
      const float* own = e + (PARTS == 1 ? 1 : 2 + part) * rows;
      Int s[2][MOST][STRIP] = {0};
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int v = 0; v < STRIP; v++)
          s[two][m][v] = zero * quad((const int8_t*)(own + 3 * rows + m));
      dots(rows, wide, part, w, v0, q, s);
      UNROLL for (int v = 0; v < STRIP; v++) {
        Vec scale, min;
        scales(head, w + CODES, part, v0 + v, &scale, &min);
        UNROLL for (int m = 0; m < rows; m++) {
          Vec* to = (Vec*)(sums + m * WIDE) + v0 + v;
          const Int sum = two ? (s[0][m][v] << 8) + s[1][m][v] : s[0][m][v];
          const Vec n = __builtin_convertvector(sum, Vec);
          *to = fused(n, scale * e[m], *to);
          if (MINS) *to = fused(min, all(own[m]), *to);
        }
      }
    }
}

// sums[rows, WIDE] = the quantised rows @ one panel; `rows` is a constant.
INLINE void product(int rows, bool wide, const int8_t* q, const uint8_t* w,
                    int64_t blocks, float* sums) {
  memset(sums, 0, rows * WIDE * sizeof *sums);
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* head = w;
    w += HEAD;
    for (int i = 0; i < DEPTH / 32; i++, w += PART) {
      add_block(rows, wide, head, w, q, sums);
      q += rows * row_bytes(wide);
    }
  }
}

typedef void Product(bool wide, const int8_t* q, const uint8_t* w,
                     int64_t blocks, float* sums);
#define OF(n)                                                            \
  static void product_##n(bool wide, const int8_t* q, const uint8_t* w,  \
                          int64_t blocks, float* sums) {                 \
    if (wide) product(least(n, HALF), true, q, w, blocks, sums);         \
    else product(least(n, MOST), false, q, w, blocks, sums);             \
  }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
static Product* const product_of[] = {
    NULL,      product_1, product_2, product_3,  product_4,  product_5, product_6,
    product_7, product_8, product_9, product_10, product_11, product_12};

// ---- The handler ------------------------------------------------------------

// quantised: of all rows, in groups of `step`. normed: memory for norm(x).
// order: row k of w is multiplied by number order[k] of norm(x); NULL: by k.
typedef struct {
  const float *x, *scale, *shift;
  const int32_t* order;
  const uint8_t* w;
  float* normed;
  int8_t* quantised;
  int64_t rows, depth, step;
  float eps;
  int norm;
  bool wide;
  Result to;
} Linear;

static void quantise_unit(const void* job, int64_t i) {
  const Linear* j = job;
  const int64_t first = i * j->step, rows = least(j->step, j->rows - first);
  const int64_t blocks = j->depth / 32, size = row_bytes(j->wide);
  int8_t* group = j->quantised + first * blocks * size;
  for (int64_t m = 0; m < rows; m++) {
    const float* x = j->x + (first + m) * j->depth;
    float* y = j->normed + (first + m) * j->depth;
    if (j->norm) {
      norm_row(j->norm, x, j->scale, j->shift, j->eps, j->depth, y);
      x = y;
    }
    for (int64_t b = 0; b < blocks; b++) {
      const float* part = x + 32 * b;
      float mixed[32];
      if (j->order) {
        for (int k = 0; k < 32; k++) mixed[k] = x[j->order[32 * b + k]];
        part = mixed;
      }
      quantise(part, j->wide, rows, m, group + b * rows * size);
    }
  }
}

static void panel_unit(const void* job, int64_t p) {
  const Linear* j = job;
  float sums[MOST * WIDE] __attribute__((aligned(64)));
  float up[MOST * WIDE] __attribute__((aligned(64)));
  const int64_t blocks = j->depth / DEPTH, size = blocks * BLOCK;
  for (int64_t m = 0; m < j->rows; m += j->step) {
    const int64_t rows = least(j->step, j->rows - m);
    const int8_t* q = j->quantised + m * (j->depth / 32) * row_bytes(j->wide);
    product_of[rows](j->wide, q, j->w + p * size, blocks, sums);
    if (j->to.gated)
      product_of[rows](j->wide, q, j->w + (j->to.panels + p) * size, blocks,
                       up);
    finish(&j->to, p, m, rows, sums, up);
  }
}

// x, w, scale and shift of a norm, bias, add, order, rows -> add + act(norm(x) @
// w + bias), the quantised rows; or none if `rows` is another call's.
XLA_FFI_Error* SpecdecQuantised(XLA_FFI_CallFrame* f) {
  if (answers_metadata(f)) return NULL;
  XLA_FFI_Buffer *x = in(f, 0), *w = in(f, 1);
  const int64_t rows = x->dims[0], depth = x->dims[1];
  const bool wide = WHOLE("wide");
  const int64_t groups = ceiling(rows, wide ? HALF : MOST);
  const int64_t bytes = rows * depth / 32 * row_bytes(wide);
  Linear j = {.x = x->data, .scale = given(f, 2), .shift = given(f, 3),
              .order = given(f, 6), .w = w->data, .rows = rows, .depth = depth,
              .step = ceiling(rows, groups), .eps = NUMBER("eps"),
              .quantised = given(f, 7) ? given(f, 7) : out(f, 1)->data,
              .norm = WHOLE("norm"), .wide = wide,
              .to = result_of(f, w->dims[0])};
  if (w->dims[1] * DEPTH != depth || w->dims[2] != BLOCK ||
      j.to.panels != ceiling(j.to.columns, WIDE) ||
      (j.order && in(f, 6)->dims[0] != depth) ||
      in(f, 7)->dims[0] + out(f, 1)->dims[0] != bytes)
    return fail(f, "quantised linear: shapes of x, w and y do not fit");
  if (!given(f, 7)) {
    j.normed = scratch(rows * depth);
    if (!j.normed) return fail(f, "quantised linear: out of memory");
    run(f, quantise_unit, &j, groups);
  }
  run(f, panel_unit, &j, j.to.panels);
  return NULL;
}
