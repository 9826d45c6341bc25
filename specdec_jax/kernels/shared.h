// What rows.c and quantised.c share: work over XLA's threads, vectors of LANES
// floats, norms, activations, and what surrounds a product; an XLA FFI handler's
// arguments.
//
// WIDE is a panel's columns. LANES, of a vector, is that of this CPU unless a
// flag gives it: 16 needs AVX-512, 8 AVX.
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

#ifndef LANES
#if defined(__AVX512F__) && WIDE == 32
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif

enum { VECTORS = WIDE / LANES };
enum { NO_NORM, RMS, LAYER };
enum { NO_ACT, SILU, GELU_TANH, GELU, RELU };

typedef float Vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Bits __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Int __attribute__((vector_size(4 * LANES), aligned(4)));
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() atomic_thread_fence(memory_order_acquire)
#endif

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

// ---- Work, shared with XLA's threads ----------------------------------------

// Units lie in one range for each thread, which reads its own from the front,
// one stretch of memory, and then helps with the others'. The caller works too,
// and waits only for units that another thread has begun: one that comes late
// finds nothing.
typedef void Unit(const void* job, int64_t i);
enum { RANGES = 64 };
typedef struct {
  Unit* unit;
  const void* job;
  int64_t units, ranges;
  atomic_llong next[RANGES], done;
  atomic_int users, came;
} Work;

static void claim(Work* w) {
  const int64_t own = atomic_fetch_add(&w->came, 1);
  for (int64_t r = 0; r < w->ranges; r++) {
    const int64_t i = (own + r) % w->ranges;
    const int64_t last = w->units * (i + 1) / w->ranges;
    for (;;) {
      const int64_t unit = atomic_fetch_add(&w->next[i], 1);
      if (unit >= last) break;
      w->unit(w->job, unit);
      atomic_fetch_add(&w->done, 1);
    }
  }
}

static void leave(Work* w) {
  if (atomic_fetch_sub(&w->users, 1) == 1) free(w);
}

static void help(void* w) {
  claim(w);
  leave(w);
}

static void run(XLA_FFI_CallFrame* f, Unit* unit, const void* job,
                int64_t units) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args n = {
      .struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE,
      .ctx = f->ctx, .num_threads = &threads};
  XLA_FFI_Error* none = f->api->XLA_FFI_ThreadPool_NumThreads(&n);
  const int64_t ranges = least(least(threads, units), RANGES);
  Work* w = none || ranges < 2 ? NULL : malloc(sizeof *w);
  if (!w) {
    for (int64_t i = 0; i < units; i++) unit(job, i);
    return;
  }
  *w = (Work){.unit = unit, .job = job, .units = units, .ranges = ranges};
  for (int64_t i = 0; i < ranges; i++)
    atomic_store(&w->next[i], units * i / ranges);
  atomic_store(&w->users, 1);
  for (int64_t i = 1; i < ranges; i++) {
    XLA_FFI_ThreadPool_Schedule_Args a = {
        .struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE,
        .ctx = f->ctx, .task = help, .data = w};
    atomic_fetch_add(&w->users, 1);
    if (f->api->XLA_FFI_ThreadPool_Schedule(&a)) leave(w);
  }
  claim(w);
  while (atomic_load_explicit(&w->done, memory_order_acquire) < units) PAUSE();
  leave(w);
}

// ---- Numbers ----------------------------------------------------------------

INLINE Vec choose(Int mask, Vec yes, Vec no) {
  return (Vec)(((Int)yes & mask) | ((Int)no & ~mask));
}

INLINE Vec all(float x) { return x - (Vec){0}; }

// exp(x), to about one unit in the last place; 0 below -87, capped at 88.
INLINE Vec exponential(Vec x) {
  const Int tiny = x < all(-87.0f);
  x = choose(x > all(88.0f), all(88.0f), choose(tiny, all(-87.0f), x));
  const Vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // nearest
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const Vec y = (Vec)((Int)p + (__builtin_convertvector(n, Int) << 23));
  return choose(tiny, all(0.0f), y);
}

// The logistic function.
INLINE Vec logistic(Vec z) { return 1.0f / (1.0f + exponential(-z)); }

INLINE Vec activation(int act, Vec x) {
  if (act == SILU) return x * logistic(x);
  if (act == GELU_TANH)  // 1 + tanh(u) is twice the logistic function of 2u.
    return x * logistic(1.5957691216f * (x + 0.044715f * x * x * x));
  if (act == RELU) return choose(x > all(0.0f), x, all(0.0f));
  if (act == GELU)
    for (int i = 0; i < LANES; i++)
      x[i] = 0.5f * x[i] * (1.0f + erff(x[i] * 0.70710678f));
  return x;
}

// The sum of the partial sums, as a tree.
INLINE float total(float* part) {
  for (int n = WIDE / 2; n; n /= 2)
    for (int i = 0; i < n; i++) part[i] += part[i + n];
  return part[0];
}

static void norm_row(int kind, const float* x, const float* scale,
                     const float* bias, float eps, int64_t n, float* y) {
  float mean = 0, part[WIDE] = {0};
  if (kind == LAYER) {
    for (int64_t k = 0; k < n; k++) part[k % WIDE] += x[k];
    mean = total(part) / n;
    memset(part, 0, sizeof part);
  }
  int64_t k = 0;
  for (; k + WIDE <= n; k += WIDE)
    for (int i = 0; i < WIDE; i++)
      part[i] += (x[k + i] - mean) * (x[k + i] - mean);
  for (int i = 0; k + i < n; i++)
    part[i] += (x[k + i] - mean) * (x[k + i] - mean);
  const float r = 1.0f / sqrtf(total(part) / n + eps);
  if (kind == LAYER)
    for (k = 0; k < n; k++) y[k] = (x[k] - mean) * r * scale[k] + bias[k];
  else
    for (k = 0; k < n; k++) y[k] = x[k] * r * scale[k];
}

static float* scratch(int64_t floats) {
  static _Thread_local float* memory;
  static _Thread_local int64_t room;
  if (room < floats) {
    free(memory);
    room = ceiling(floats, 1024) * 1024;
    memory = aligned_alloc(64, room * sizeof *memory);
  }
  return memory;
}

// ---- Results ----------------------------------------------------------------

// What becomes of a product: y = add + act(product + bias), or
// add + act(product + bias) * (product of up + its bias) if gated.
typedef struct {
  const float *bias, *add;
  float* y;
  int64_t columns, panels;
  int act;
  bool gated;
} Result;

// Panel p of `rows` rows from row m0 on, whose products are sums and, if gated,
// up; both [rows, WIDE]. sums is overwritten.
static void finish(const Result* r, int64_t p, int64_t m0, int64_t rows,
                   float* sums, const float* up) {
  const Vec* bias = (const Vec*)(r->bias + p * WIDE);
  const Vec* bias_up = (const Vec*)(r->bias + (r->panels + p) * WIDE);
  const int64_t n = least(WIDE, r->columns - p * WIDE);
  for (int64_t m = 0; m < rows; m++) {
    Vec* s = (Vec*)(sums + m * WIDE);
    const Vec* u = (const Vec*)(up + m * WIDE);
    for (int v = 0; v < VECTORS; v++) {
      s[v] = activation(r->act, r->bias ? s[v] + bias[v] : s[v]);
      if (r->gated) s[v] *= r->bias ? u[v] + bias_up[v] : u[v];
    }
    const int64_t at = (m0 + m) * r->columns + p * WIDE;
    const float* out = (const float*)s;
    for (int64_t c = 0; c < n; c++)
      r->y[at + c] = r->add ? r->add[at + c] + out[c] : out[c];
  }
}

// ---- Handlers ---------------------------------------------------------------

static XLA_FFI_Error* fail(XLA_FFI_CallFrame* f, const char* why) {
  XLA_FFI_Error_Create_Args a = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = why,
      .errc = XLA_FFI_Error_Code_INVALID_ARGUMENT};
  return f->api->XLA_FFI_Error_Create(&a);
}

// XLA asks each handler once for the version of the interface that it has.
static bool answers_metadata(XLA_FFI_CallFrame* f) {
  // jaxlib 0.10 and 0.11 have different names for the type of the pointer.
  XLA_FFI_Metadata_Extension* e = (void*)f->extension_start;
  if (!e || e->extension_base.type != XLA_FFI_Extension_Metadata) return false;
  XLA_FFI_Metadata* m = e->metadata;
  m->api_version.major_version = XLA_FFI_API_MAJOR;
  m->api_version.minor_version = XLA_FFI_API_MINOR;
  return true;
}

INLINE XLA_FFI_Buffer* in(XLA_FFI_CallFrame* f, int i) {
  return f->args.args[i];
}

INLINE XLA_FFI_Buffer* out(XLA_FFI_CallFrame* f, int i) {
  return f->rets.rets[i];
}

// The data of an argument; NULL for one that was left out, which has no rows.
INLINE void* given(XLA_FFI_CallFrame* f, int i) {
  return in(f, i)->dims[0] ? in(f, i)->data : NULL;
}

static const void* named(XLA_FFI_CallFrame* f, const char* name) {
  for (int64_t i = 0; i < f->attrs.size; i++)
    if (f->attrs.names[i]->len == strlen(name) &&
        !memcmp(f->attrs.names[i]->ptr, name, strlen(name)))
      return ((XLA_FFI_Scalar*)f->attrs.attrs[i])->value;
  return NULL;
}
#define NUMBER(name) (*(const float*)named(f, name))
#define WHOLE(name) (*(const int32_t*)named(f, name))

// The result of a product whose weights have `panels` panels: bias and add are
// arguments 4 and 5.
static Result result_of(XLA_FFI_CallFrame* f, int64_t panels) {
  const bool gated = WHOLE("gated");
  return (Result){.bias = given(f, 4), .add = given(f, 5),
                  .y = out(f, 0)->data, .columns = out(f, 0)->dims[1],
                  .panels = panels / (gated ? 2 : 1), .act = WHOLE("act"),
                  .gated = gated};
}
