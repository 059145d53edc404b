/* What torch has no single operation for: a convolution with its pooling and ReLU in one pass, pooling with ReLU, and the
   transforms of tiles. Compiled on this machine when first needed; see native.py. All arrays are float32, channels last
   and dense in their channels; sizes are long. Every function works in the calling thread alone, in a fixed order. */

#include <stdint.h>

#if defined(__AVX512F__)
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(WIDTH), aligned(1), may_alias));

enum { OFF = 4 }; /* in `which`: ReLU took all four values; else 0 to 3, the one that pooling kept */

/* Channels are taken in vectors of so many. */
long width(void) { return WIDTH; }

INLINE vec masked(ivec mask, vec value) { return (vec)(mask & (ivec)value); }

/* The largest of four values, as max_pool2d has it (the first of equals; not-a-number wins), plus bias, then ReLU. */
INLINE void pool_one(const vec value[4], vec bias, float *out, uint8_t *which) {
  vec best = value[0];
  ivec place = {0};
  for (int o = 1; o < 4; o++) {
    ivec more = (value[o] > best) | (value[o] != value[o]);
    best = (vec)((more & (ivec)value[o]) | (~more & (ivec)best));
    place = (more & o) | (~more & place);
  }
  best += bias;
  ivec off = best <= 0.0f;
  *(vec *)out = masked(~off, best);
  if (which) *(bytes *)which = __builtin_convertvector((off & OFF) | (~off & place), bytes);
}

/* --- convolution, 2x2 max pooling, ReLU; few input channels ----------------------------------------------------------

   x (N, H, W, C), w (r, r, C, K), b (K) -> out, which (N, P, Q, K), P = (H - r + 1) / 2; d is the gradient of out. */

typedef struct { long images, height, width, channels, side, kernels; } Conv;

INLINE void conv_pool_some(const int vectors, const float *x, const float *w, const float *b, float *out, uint8_t *which,
                           const Conv *c, long columns) {
  const long taps = c->side * c->channels, line = c->width * c->channels, across = c->channels;
  for (long j = 0; j < columns; j++, x += 2 * across, out += c->kernels, which += which ? c->kernels : 0) {
    vec sums[4][4];
    for (int v = 0; v < vectors; v++)
      for (int o = 0; o < 4; o++) sums[o][v] = (vec){0};
    for (long r = 0; r < c->side; r++) {
      const float *upper = x + r * line, *lower = upper + line, *weight = w + r * taps * c->kernels;
      for (long t = 0; t < taps; t++, weight += c->kernels)
        for (int v = 0; v < vectors; v++) {
          vec each = *(const vec *)(weight + v * WIDTH);
          sums[0][v] += upper[t] * each;
          sums[1][v] += upper[t + across] * each;
          sums[2][v] += lower[t] * each;
          sums[3][v] += lower[t + across] * each;
        }
    }
    for (int v = 0; v < vectors; v++) {
      vec four[4] = {sums[0][v], sums[1][v], sums[2][v], sums[3][v]};
      pool_one(four, *(const vec *)(b + v * WIDTH), out + v * WIDTH, which ? which + v * WIDTH : 0);
    }
  }
}

INLINE void conv_pool_gradient_some(const int vectors, const float *restrict x, const float *restrict d,
                                    const uint8_t *restrict which, float *restrict dw, float *restrict db,
                                    const Conv *c, long columns) {
  const long taps = c->side * c->channels, line = c->width * c->channels, across = c->channels;
  for (long j = 0; j < columns; j++, x += 2 * across, d += c->kernels, which += c->kernels) {
    vec parts[4][4];
    for (int v = 0; v < vectors; v++) {
      vec whole = *(const vec *)(d + v * WIDTH);
      ivec place = __builtin_convertvector(*(const bytes *)(which + v * WIDTH), ivec);
      for (int o = 0; o < 4; o++) parts[o][v] = masked(place == o, whole);
      *(vec *)(db + v * WIDTH) += masked(place != OFF, whole);
    }
    for (long r = 0; r < c->side; r++) {
      const float *upper = x + r * line, *lower = upper + line;
      float *sum = dw + r * taps * c->kernels;
      for (long t = 0; t < taps; t++, sum += c->kernels) {
        const float values[4] = {upper[t], upper[t + across], lower[t], lower[t + across]};
        for (int v = 0; v < vectors; v++) {
          vec each = *(vec *)(sum + v * WIDTH);
          for (int o = 0; o < 4; o++) each += values[o] * parts[o][v];
          *(vec *)(sum + v * WIDTH) = each;
        }
      }
    }
  }
}

#if WIDTH == 16 && defined(__GNUC__) && !defined(__clang__)
#define CHOOSES 1

/* As above, with a quarter of the products: of the four values that a pixel of `out` came from only one has a gradient,
   and one instruction picks it for each channel from two lines of x. It loads WIDTH inputs from either line, some of
   them beyond the last that is used. `pixels` are taken at a time, so that sums are loaded and stored less often. */
INLINE void conv_pool_gradient_chosen(const int vectors, const int pixels, const float *restrict x,
                                      const float *restrict d, const uint8_t *restrict which, float *restrict dw,
                                      float *restrict db, const Conv *c) {
  const long taps = c->side * c->channels, line = c->width * c->channels, across = c->channels;
  vec whole[2][4];
  ivec chosen[2][4];
  for (int p = 0; p < pixels; p++)
    for (int v = 0; v < vectors; v++) {
      const long at = p * c->kernels + v * WIDTH;
      ivec place = __builtin_convertvector(*(const bytes *)(which + at), ivec);
      whole[p][v] = masked(place != OFF, *(const vec *)(d + at));
      chosen[p][v] = (place & 1) * (int)across + (place & 2) * (WIDTH / 2);
      *(vec *)(db + v * WIDTH) += whole[p][v];
    }
  for (long r = 0; r < c->side; r++) {
    const float *upper = x + r * line, *lower = upper + line;
    float *sum = dw + r * taps * c->kernels;
    for (long t = 0; t < taps; t++, sum += c->kernels) {
      vec above[2], below[2];
      for (int p = 0; p < pixels; p++) {
        above[p] = *(const vec *)(upper + t + 2 * p * across);
        below[p] = *(const vec *)(lower + t + 2 * p * across);
      }
      for (int v = 0; v < vectors; v++) {
        vec each = *(vec *)(sum + v * WIDTH);
        for (int p = 0; p < pixels; p++) each += __builtin_shuffle(above[p], below[p], chosen[p][v]) * whole[p][v];
        *(vec *)(sum + v * WIDTH) = each;
      }
    }
  }
}
#else
#define CHOOSES 0
#define conv_pool_gradient_chosen(...) ((void)0)
#endif

/* Four vectors of channels at a time where registers suffice, then two, then one: `CALL(vectors, first channel)`. */
#define ALL_CHANNELS(kernels, CALL)                                         \
  for (long k = 0; k < (kernels);) {                                        \
    if (WIDTH == 16 && (kernels) - k >= 4 * WIDTH) { CALL(4, k); k += 4 * WIDTH; } \
    else if ((kernels) - k >= 2 * WIDTH) { CALL(2, k); k += 2 * WIDTH; }    \
    else { CALL(1, k); k += WIDTH; }                                        \
  }

void conv_pool(const float *x, const float *w, const float *b, float *out, uint8_t *which, const Conv *c) {
  const long rows = (c->height - c->side + 1) / 2, columns = (c->width - c->side + 1) / 2, line = c->width * c->channels;
  for (long n = 0; n < c->images; n++)
    for (long i = 0; i < rows; i++) {
      const float *from = x + (n * c->height + 2 * i) * line;
      const long at = (n * rows + i) * columns * c->kernels;
#define CALL(vectors, k) conv_pool_some(vectors, from, w + k, b + k, out + at + k, which ? which + at + k : 0, c, columns)
      ALL_CHANNELS(c->kernels, CALL)
#undef CALL
    }
}

void conv_pool_gradient(const float *x, const float *d, const uint8_t *which, float *dw, float *db, const Conv *c) {
  const long rows = (c->height - c->side + 1) / 2, columns = (c->width - c->side + 1) / 2, line = c->width * c->channels;
  for (long n = 0; n < c->images; n++)
    for (long i = 0; i < rows; i++) {
      const float *from = x + (n * c->height + 2 * i) * line;
      const long at = (n * rows + i) * columns * c->kernels;
      /* Whether the last load of WIDTH inputs from this line ends inside of x. */
      const long last = (n * c->height + 2 * i + c->side) * line + 2 * (columns - 1) * c->channels;
      const int inside = last + c->side * c->channels + WIDTH - 1 <= c->images * c->height * line;
#define CALL(vectors, k)                                                                                            \
  if (CHOOSES && inside && c->channels < WIDTH) {                                                                   \
    long j = 0;                                                                                                     \
    for (; j + 2 <= columns; j += 2) CHOSEN(vectors, 2, k, j);                                                      \
    if (j < columns) CHOSEN(vectors, 1, k, j);                                                                      \
  } else                                                                                                            \
    conv_pool_gradient_some(vectors, from, d + at + k, which + at + k, dw + k, db + k, c, columns)
#define CHOSEN(vectors, pixels, k, j)                                                                               \
  conv_pool_gradient_chosen(vectors, pixels, from + 2 * (j) * c->channels, d + at + (j) * c->kernels + (k),         \
                            which + at + (j) * c->kernels + (k), dw + (k), db + (k), c)
      ALL_CHANNELS(c->kernels, CALL)
#undef CALL
#undef CHOSEN
    }
}

/* --- transforms of tiles ---------------------------------------------------------------------------------------------

   out[i, j] = sum over k, l of m[i, k] m[j, l] x[k, l], for every tile and channel; m (rows, columns). Tiles are counted
   by three indices, each with a stride of its own in x and in out; so are the two indices inside of a tile. With `add`
   that is added to what out holds, where tiles may overlap. */

typedef struct {
  long rows, columns, channels, add, count[3], from_tile[3], from[2], to_tile[3], to[2]; /* strides in floats */
} Tiles;

/* Rows or columns of m; outputs at a time, which share the load of an input; bytes that are asked for ahead: the next
   channels of the same place, since places are too far apart for the processor to guess. */
enum { MOST = 24, GROUP = 6, AHEAD = 4 * WIDTH };

INLINE void line_some(const int outputs, const int add, const float *m, const char *x, long step, long columns, char *out,
                      long apart) {
  vec sums[GROUP];
  for (int i = 0; i < outputs; i++) sums[i] = (vec){0};
  for (long k = 0; k < columns; k++, x += step, m += MOST) {
    vec each = *(const vec *)x;
    __builtin_prefetch(x + AHEAD);
    for (int i = 0; i < outputs; i++) sums[i] += m[i] * each;
  }
  for (int i = 0; i < outputs; i++) {
    vec *place = (vec *)(out + i * apart);
    __builtin_prefetch((char *)place + AHEAD, 1);
    if (add) sums[i] += *place;
    *place = sums[i];
  }
}

/* One line of a tile: `columns` vectors `step` bytes apart -> `rows` vectors `apart` bytes apart; m is transposed. */
INLINE void line_all(const int add, const float *m, long rows, long columns, const char *x, long step, char *out,
                     long apart) {
  long i = 0;
#define SOME(outputs) line_some(outputs, add, m + i, x, step, columns, out + i * apart, apart)
  for (; i + GROUP <= rows; i += GROUP) SOME(GROUP);
  switch (rows - i) {
    case 5: SOME(5); break;
    case 4: SOME(4); break;
    case 3: SOME(3); break;
    case 2: SOME(2); break;
    case 1: SOME(1); break;
  }
#undef SOME
}

void transform(const float *m, const float *x, float *out, const Tiles *t) {
  float turned[MOST * MOST]; /* m transposed, so that the factors of one input lie together */
  vec lines[MOST * MOST] __attribute__((aligned(64)));
  const long size = sizeof(vec), rows = t->rows, columns = t->columns;
  for (long i = 0; i < rows; i++)
    for (long k = 0; k < columns; k++) turned[k * MOST + i] = m[i * columns + k];
  for (long a = 0; a < t->count[0]; a++)
    for (long b = 0; b < t->count[1]; b++)
      for (long c = 0; c < t->count[2]; c++) {
        const float *tile = x + a * t->from_tile[0] + b * t->from_tile[1] + c * t->from_tile[2];
        float *place = out + a * t->to_tile[0] + b * t->to_tile[1] + c * t->to_tile[2];
        for (long channel = 0; channel < t->channels; channel += WIDTH) {
          for (long l = 0; l < columns; l++)
            line_all(0, turned, rows, columns, (const char *)(tile + l * t->from[1] + channel), 4 * t->from[0],
                     (char *)(lines + l), size * columns);
          for (long i = 0; i < rows; i++) {
            const char *line = (const char *)(lines + i * columns);
            char *to = (char *)(place + i * t->to[0] + channel);
            if (t->add) line_all(1, turned, rows, columns, line, size, to, 4 * t->to[1]);
            else line_all(0, turned, rows, columns, line, size, to, 4 * t->to[1]);
          }
        }
      }
}

/* --- 2x2 max pooling of x + bias, ReLU -------------------------------------------------------------------------------

   x (N, H, W, K), b (K) -> out, which (N, H/2, W/2, K); the gradient of x from that of out. */

typedef struct { long images, height, width, channels; } Image;

void pool_relu(const float *x, const float *b, float *out, uint8_t *which, const Image *s) {
  const long line = s->width * s->channels;
  for (long n = 0; n < s->images; n++)
    for (long i = 0; i < s->height / 2; i++)
      for (long j = 0; j < s->width / 2; j++)
        for (long k = 0; k < s->channels; k += WIDTH) {
          const float *at = x + (n * s->height + 2 * i) * line + 2 * j * s->channels + k;
          const long to = ((n * (s->height / 2) + i) * (s->width / 2) + j) * s->channels + k;
          vec four[4] = {*(const vec *)at, *(const vec *)(at + s->channels), *(const vec *)(at + line),
                         *(const vec *)(at + line + s->channels)};
          pool_one(four, *(const vec *)(b + k), out + to, which ? which + to : 0);
        }
}

/* dx is zero before, where an odd last row or column has no part in any output. */
void pool_relu_gradient(const float *d, const uint8_t *which, float *dx, float *db, const Image *s) {
  const long line = s->width * s->channels;
  for (long n = 0; n < s->images; n++)
    for (long i = 0; i < s->height / 2; i++)
      for (long j = 0; j < s->width / 2; j++)
        for (long k = 0; k < s->channels; k += WIDTH) {
          float *at = dx + (n * s->height + 2 * i) * line + 2 * j * s->channels + k;
          const long from = ((n * (s->height / 2) + i) * (s->width / 2) + j) * s->channels + k;
          vec whole = *(const vec *)(d + from);
          ivec place = __builtin_convertvector(*(const bytes *)(which + from), ivec);
          *(vec *)at = masked(place == 0, whole);
          *(vec *)(at + s->channels) = masked(place == 1, whole);
          *(vec *)(at + line) = masked(place == 2, whole);
          *(vec *)(at + line + s->channels) = masked(place == 3, whole);
          *(vec *)(db + k) += masked(place != OFF, whole);
        }
}
