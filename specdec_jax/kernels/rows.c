// A transformer layer for few rows on CPU, as three XLA FFI handlers: products
// with their norm and activation, attention over the cache, and a norm.
//
// Weights, keys and values lie in panels [panel, K, WIDE]: columns that are read
// in one stream for all rows of a call. Every output is one chain of
// multiply-adds over k in order, so its bits depend neither on how many rows a
// call has nor on how many threads there are.
//
// WIDE is 32 with AVX-512 and else 16 (library.py).
#include "shared.h"

#if LANES == 16
enum { MOST = 12, DEEP = 128, AHEAD = 256 };
#elif LANES == 8
enum { MOST = 6, DEEP = 96, AHEAD = 1024 };
#else
enum { MOST = 3, DEEP = 96, AHEAD = 1024 };
#endif
// MOST: rows whose sums fit in the registers. DEEP: how much of a panel stays in
// the L1 cache while further rows read it. GROUP: rows of one unit of work.
// AHEAD, AHEAD_HALF: bytes between a prefetch and its use, of float32 and of
// bfloat16; panels of 32 float32 columns at the other's distance take five rows
// a quarter longer.
enum { GROUP = 96, AHEAD_HALF = 2048 };

// ---- Products ---------------------------------------------------------------

// Rows of x, and the part of a panel of w that they are multiplied by. `ahead`:
// the bytes between a prefetch and its use.
typedef struct {
  const float* x;
  int64_t stride;
  const char* w;
  int64_t depth, ahead;
} Part;

// sums[m] += x[m, k] * w[k] over k in order; `rows` is a constant. A pair of
// bfloat16 columns i and i + WIDE / 2 is one word of w.
INLINE void add_rows(int rows, bool half, Part p, float* sums) {
  Vec a[MOST][VECTORS], b[VECTORS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int v = 0; v < VECTORS; v++)
      a[m][v] = ((const Vec*)(sums + m * WIDE))[v];
  const int64_t step = WIDE * (half ? 2 : 4);
  const char* w = p.w;
  for (int64_t k = 0; k < p.depth; k++, w += step) {
    if (half) {
      UNROLL for (int v = 0; v < VECTORS / 2; v++) {
        const Bits u = ((const Bits*)w)[v];
        b[v] = (Vec)(u << 16);
        b[v + VECTORS / 2] = (Vec)(u & 0xffff0000u);
      }
    } else {
      UNROLL for (int v = 0; v < VECTORS; v++) b[v] = ((const Vec*)w)[v];
    }
    __builtin_prefetch(w + p.ahead);
    if (step > 64) __builtin_prefetch(w + p.ahead + 64);
    UNROLL for (int m = 0; m < rows; m++) {
      const float s = p.x[m * p.stride + k];
      UNROLL for (int v = 0; v < VECTORS; v++) a[m][v] += s * b[v];
    }
  }
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int v = 0; v < VECTORS; v++)
      ((Vec*)(sums + m * WIDE))[v] = a[m][v];
}

typedef void AddRows(bool half, Part p, float* sums);
#define OF(n)                                           \
  static void add_##n(bool half, Part p, float* sums) { \
    if (half) add_rows(least(n, MOST), true, p, sums);  \
    else add_rows(least(n, MOST), false, p, sums);      \
  }
OF(1) OF(2) OF(3) OF(4) OF(5) OF(6) OF(7) OF(8) OF(9) OF(10) OF(11) OF(12)
static AddRows* const add_of[] = {
    NULL,  add_1, add_2, add_3, add_4,  add_5, add_6,
    add_7, add_8, add_9, add_10, add_11, add_12};

// sums[rows, WIDE] = x[rows, depth] @ one panel. A row alone is done twice, which
// is faster: with less to do, its loads would run ahead of the prefetches.
static void product(bool half, const float* x, int64_t stride, int64_t rows,
                    const char* w, int64_t depth, float* sums) {
  const int64_t near = half ? AHEAD_HALF : AHEAD, size = WIDE * (half ? 2 : 4);
  if (rows == 1) {
    float twice[2 * WIDE] __attribute__((aligned(64))) = {0};
    add_2(half, (Part){x, 0, w, depth, near}, twice);
    memcpy(sums, twice, WIDE * sizeof *sums);
    return;
  }
  const int64_t parts = ceiling(rows, MOST), step = ceiling(rows, parts);
  const int64_t deep = parts == 1 ? depth : DEEP;
  // The second rows find their part of the panel in the cache: what they fetch
  // is the next part, so that memory does not wait for them.
  const int64_t next = LANES < 16 ? deep * size : near;
  memset(sums, 0, rows * WIDE * sizeof *sums);
  for (int64_t k = 0; k < depth; k += deep)
    for (int64_t m = 0; m < rows; m += step) {
      const Part part = {
          .x = x + m * stride + k, .stride = stride, .w = w + k * size,
          .depth = least(deep, depth - k),
          .ahead = m == step ? next : near};
      add_of[least(step, rows - m)](half, part, sums + m * WIDE);
    }
}

// A product and what becomes of it; if gated, w holds the panels of both.
typedef struct {
  const float* x;
  const char* w;
  int64_t rows, depth;
  bool half;
  Result to;
} Linear;

static void linear_unit(const void* job, int64_t i) {
  const Linear* j = job;
  float sums[GROUP * WIDE] __attribute__((aligned(64)));
  float up[GROUP * WIDE] __attribute__((aligned(64)));
  const int64_t panels = j->to.panels, p = i % panels, m0 = i / panels * GROUP;
  const int64_t rows = least(GROUP, j->rows - m0);
  const int64_t size = j->depth * WIDE * (j->half ? 2 : 4);
  const float* x = j->x + m0 * j->depth;
  product(j->half, x, j->depth, rows, j->w + p * size, j->depth, sums);
  if (j->to.gated)
    product(j->half, x, j->depth, rows, j->w + (panels + p) * size, j->depth,
            up);
  finish(&j->to, p, m0, rows, sums, up);
}

// ---- Attention --------------------------------------------------------------

// Keys are panels over slots, [B, G, S / WIDE, C, WIDE]; values panels over
// channels, [B, G, C / WIDE, S, WIDE]. S is a multiple of WIDE here; `seen` is
// not.
// The H / G query heads of a key/value head and their tokens are the rows of
// its products: q is [B, G, T * H / G, C].
typedef struct {
  const float *q, *keys, *values, *bias;
  const bool* mask;
  const int32_t* at;  // positions of the slots, [B, seen]; NULL: their indices
  float* y;
  int64_t B, T, H, G, C, S, seen, blocks, stride;
  float scale, cap;
} Attend;

// True where a token sees slots i to i + LANES; its row of the mask ends at n.
INLINE Int visible(const bool* sees, int64_t i, int64_t n) {
  typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
  uint8_t part[LANES] = {0};
  if (i + LANES > n) {
    for (int l = 0; i + l < n; l++) part[l] = sees[i + l];
    return __builtin_convertvector(*(const Bytes*)part, Int) != 0;
  }
  return __builtin_convertvector(*(const Bytes*)(sees + i), Int) != 0;
}

// Numbers i to i + LANES of a row that ends at n.
INLINE Vec some(const float* row, int64_t i, int64_t n) {
  Vec x = {0};
  if (i + LANES <= n) return *(const Vec*)(row + i);
  for (int l = 0; i + l < n; l++) x[l] = row[i + l];
  return x;
}

// cap * tanh(x / cap).
INLINE Vec softcap(Vec x, float cap) {
  return cap * (2.0f * logistic(x * (2.0f / cap)) - 1.0f);
}

// Softmax of one row over the slots that its token sees: scores, its products
// with the keys, become the weights. Returns their sum, each lane of which is of
// positions, so that a path in a tree has the bits of a chain.
// bias: what is added to the scores, or NULL. at: the slots' positions; before
// slot `apart` these are their indices.
static float weigh(const Attend* j, const bool* sees, const float* bias,
                   const int32_t* at, int64_t apart, int64_t end, float* s) {
  Vec most = all(-1e30f), part[VECTORS] = {{0}};
  for (int64_t i = 0; i < end; i += LANES) {
    Vec x = *(Vec*)(s + i) * j->scale;
    if (j->cap > 0) x = softcap(x, j->cap);
    if (bias) x += some(bias, i, j->seen);
    x = choose(visible(sees, i, j->seen), x, all(-1e30f));
    *(Vec*)(s + i) = x;
    most = choose(x > most, x, most);
  }
  float top = -1e30f;
  for (int l = 0; l < LANES; l++) top = most[l] > top ? most[l] : top;
  for (int64_t i = 0; i < end; i += WIDE)
    for (int v = 0; v < VECTORS; v++) {
      Vec* x = (Vec*)(s + i) + v;
      *x = choose(*x > all(-1e29f), exponential(*x - top), all(0.0f));
      if (i < apart) part[v] += *x;
    }
  float* lanes = (float*)part;
  for (int64_t i = apart; i < least(end, j->seen); i++)
    lanes[at[i] & (WIDE - 1)] += s[i];
  return total(lanes);
}

// Some of the rows of one key/value head.
static void attend_unit(const void* job, int64_t i) {
  const Attend* j = job;
  const int64_t share = j->H / j->G, C = j->C, S = j->S;
  const int64_t most = ceiling(j->T * share, j->blocks);
  const int64_t head = i / j->blocks, b = head / j->G, g = head % j->G;
  const int64_t first = i % j->blocks * most;
  const int64_t rows = least(most, j->T * share - first);
  const float* keys = j->keys + head * S * C;
  const float* values = j->values + head * S * ceiling(C, WIDE) * WIDE;
  const bool* sees[MOST];
  int64_t end = 0;  // past the last slot that one of them sees
  for (int64_t m = 0; m < rows; m++) {
    sees[m] = j->mask + (b * j->T + (first + m) / share) * j->seen;
    for (int64_t s = j->seen; s > end; s--)
      if (sees[m][s - 1]) end = s;
  }
  const int32_t* at = j->at ? j->at + b * j->seen : NULL;
  int64_t apart = 0;
  while (at && apart < end && at[apart] == apart) apart++;
  end = ceiling(end, WIDE) * WIDE;
  apart = at ? apart / WIDE * WIDE : end;
  float *score = scratch(rows * j->stride), sums[MOST * WIDE], sum[MOST];
  const float* q = j->q + (head * j->T * share + first) * C;
  for (int64_t s = 0; s < end; s += WIDE) {
    product(false, q, C, rows, (const char*)(keys + s * C), C, sums);
    for (int64_t m = 0; m < rows; m++)
      memcpy(score + m * j->stride + s, sums + m * WIDE, sizeof(float) * WIDE);
  }
  for (int64_t m = 0; m < rows; m++) {
    const int64_t t = (first + m) / share, h = g * share + (first + m) % share;
    const float* bias =
        j->bias ? j->bias + ((b * j->H + h) * j->T + t) * j->seen : NULL;
    sum[m] = weigh(j, sees[m], bias, at, apart, end, score + m * j->stride);
  }
  for (int64_t c = 0; c < C; c += WIDE) {
    product(false, score, j->stride, rows, (const char*)(values + c * S), end,
            sums);
    for (int64_t m = 0; m < rows; m++) {
      const int64_t t = (first + m) / share, h = g * share + (first + m) % share;
      float* y = j->y + ((b * j->T + t) * j->H + h) * C;
      for (int64_t k = c; k < least(c + WIDE, C); k++)
        y[k] = sum[m] > 0 ? sums[m * WIDE + k - c] / sum[m] : 0;
    }
  }
}

// y = x, its pairs of channels (c, c + C/2) rotated.
INLINE void rotate(const float* x, const float* cos, const float* sin,
                   int64_t C, float* y) {
  for (int64_t c = 0; c < C / 2; c++) {
    const float a = x[c], b = x[c + C / 2];
    y[c] = a * cos[c] - b * sin[c];
    y[c + C / 2] = b * cos[c] + a * sin[c];
  }
}

// ---- Handlers ---------------------------------------------------------------

// x, w, scale and shift of a norm, bias, add -> add + act(norm(x) @ w + bias).
XLA_FFI_Error* SpecdecLinear(XLA_FFI_CallFrame* f) {
  if (answers_metadata(f)) return NULL;
  XLA_FFI_Buffer *x = in(f, 0), *w = in(f, 1);
  const int norm = WHOLE("norm");
  Linear j = {.x = x->data, .w = w->data, .rows = x->dims[0],
              .depth = w->dims[1], .half = w->dtype == XLA_FFI_DataType_BF16,
              .to = result_of(f, w->dims[0])};
  if (w->dims[2] != WIDE || x->dims[1] != j.depth ||
      j.to.panels != ceiling(j.to.columns, WIDE))
    return fail(f, "linear: shapes of x, w and y do not fit");
  if (norm) {
    float* normed = scratch(j.rows * j.depth);
    if (!normed) return fail(f, "linear: out of memory");
    for (int64_t m = 0; m < j.rows; m++)
      norm_row(norm, j.x + m * j.depth, given(f, 2), given(f, 3), NUMBER("eps"),
               j.depth, normed + m * j.depth);
    j.x = normed;
  }
  run(f, linear_unit, &j, j.to.panels * ceiling(j.rows, GROUP));
  return NULL;
}

// x, scale and shift of a norm, add -> add + norm(x).
XLA_FFI_Error* SpecdecNorm(XLA_FFI_CallFrame* f) {
  if (answers_metadata(f)) return NULL;
  XLA_FFI_Buffer* x = in(f, 0);
  const int64_t n = x->dims[1];
  const float* add = given(f, 3);
  for (int64_t m = 0; m < x->dims[0]; m++) {
    float* y = (float*)out(f, 0)->data + m * n;
    norm_row(WHOLE("norm"), (float*)x->data + m * n, given(f, 1), given(f, 2),
             NUMBER("eps"), n, y);
    if (add)
      for (int64_t k = 0; k < n; k++) y[k] += add[m * n + k];
  }
  return NULL;
}

// qkv, cos, sin, slots, mask, scales of the queries' and keys' RMS norms, keys,
// values, bias, for a tree the positions of the slots -> y, keys, values. Rotates
// queries and keys, writes keys and values to the cache, which is the arguments'
// memory, and attends. With y as the only result there are only queries, and
// nothing is written.
XLA_FFI_Error* SpecdecAttend(XLA_FFI_CallFrame* f) {
  if (answers_metadata(f)) return NULL;
  XLA_FFI_Buffer *slots = in(f, 3), *k = in(f, 7), *v = in(f, 8);
  const bool writes = f->rets.size > 1;
  float *keys = writes ? out(f, 1)->data : k->data;
  float *values = writes ? out(f, 2)->data : v->data;
  const float *cos = given(f, 1), *sin = given(f, 2);
  const float *qn = given(f, 5), *kn = given(f, 6);
  const int64_t B = slots->dims[0], T = slots->dims[1], G = k->dims[1];
  const int64_t C = k->dims[3], S = v->dims[3], seen = in(f, 4)->dims[2];
  const int64_t H = out(f, 0)->dims[1] / C, written = writes ? G : 0;
  const int64_t F = (H + 2 * written) * C;
  const int64_t wide = ceiling(C, WIDE) * WIDE;
  if (k->dims[2] * WIDE != S || v->dims[2] * WIDE != wide ||
      in(f, 0)->dims[1] != F || C > 1024)
    return fail(f, "attend: shapes of qkv and cache do not fit");
  if (keys != k->data) memcpy(keys, k->data, sizeof(float) * B * G * S * C);
  if (values != v->data)
    memcpy(values, v->data, sizeof(float) * B * G * S * wide);
  float *q = malloc(sizeof(float) * B * T * H * C), x[1024], y[1024];
  if (!q) return fail(f, "attend: out of memory");
  for (int64_t i = 0; i < B * T; i++) {
    const float* row = (const float*)in(f, 0)->data + i * F;
    const int64_t slot = ((const int32_t*)slots->data)[i];
    for (int64_t h = 0; h < H + written; h++) {
      const float* norm = h < H ? qn : kn;
      if (norm)
        norm_row(RMS, row + h * C, norm, NULL, NUMBER("eps"), C, x);
      else
        memcpy(x, row + h * C, sizeof(float) * C);
      const float* from = x;
      if (cos) {
        rotate(x, cos + i * C / 2, sin + i * C / 2, C, y);
        from = y;
      }
      if (h < H) {
        const int64_t share = H / G, at = i / T * G + h / share;
        float* to = q + ((at * T + i % T) * share + h % share) * C;
        memcpy(to, from, sizeof(float) * C);
      } else if (slot < seen) {
        const int64_t g = i / T * G + h - H;
        float* to = keys + (g * S + slot / WIDE * WIDE) * C + slot % WIDE;
        for (int64_t c = 0; c < C; c++) to[c * WIDE] = from[c];
      }
    }
    for (int64_t g = 0; g < written && slot < seen; g++)
      for (int64_t c = 0; c < C; c++)
        values[(i / T * G + g) * S * wide + (c / WIDE * S + slot) * WIDE +
               c % WIDE] = row[(H + G + g) * C + c];
  }
  Attend j = {.q = q, .keys = keys, .values = values, .bias = given(f, 9),
              .mask = in(f, 4)->data, .y = out(f, 0)->data,
              .at = f->args.size > 10 ? in(f, 10)->data : NULL,
              .B = B, .T = T, .H = H, .G = G, .C = C, .S = S, .seen = seen,
              .blocks = ceiling(T * H / G, MOST),
              // Not a multiple of 4096 bytes: rows would share cache lines.
              .stride = S + 48,
              .scale = NUMBER("scale"), .cap = NUMBER("cap")};
  run(f, attend_unit, &j, B * G * j.blocks);
  free(q);
  return NULL;
}
