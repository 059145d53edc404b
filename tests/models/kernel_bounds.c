/* Every kernel on small shapes, in buffers of just the size it needs: built with a sanitizer, a step outside ends it. */
#include "../../src/fednh/models/kernels.c"

#include <stdio.h>
#include <stdlib.h>

static float *floats(long count) { return calloc(count, sizeof(float)); }

static void conv(Conv c) {
  const long pixels = c.images * ((c.height - c.side + 1) / 2) * ((c.width - c.side + 1) / 2);
  const long weights = c.side * c.side * c.channels * c.kernels;
  float *x = floats(c.images * c.height * c.width * c.channels), *w = floats(weights), *b = floats(c.kernels);
  float *out = floats(pixels * c.kernels), *dw = floats(weights), *db = floats(c.kernels);
  uint8_t *which = calloc(pixels * c.kernels, 1);
  conv_pool(x, w, b, out, which, &c);
  conv_pool(x, w, b, out, 0, &c);
  conv_pool_gradient(x, out, which, dw, db, &c);
  free(x), free(w), free(b), free(out), free(dw), free(db), free(which);
}

static void pool(Image s) {
  const long pixels = s.images * (s.height / 2) * (s.width / 2) * s.channels, all = s.images * s.height * s.width;
  float *x = floats(all * s.channels), *b = floats(s.channels), *out = floats(pixels), *db = floats(s.channels);
  uint8_t *which = calloc(pixels, 1);
  pool_relu(x, b, out, which, &s);
  pool_relu_gradient(out, which, x, db, &s);
  free(x), free(b), free(out), free(db), free(which);
}

static void tiles(long rows, long columns, long channels, long add) {
  const long from = columns * columns * channels, to = rows * rows * channels;
  float *m = floats(rows * columns), *x = floats(8 * from), *out = floats(8 * to);
  Tiles t = {rows, columns, channels, add, {2, 2, 2}, {4 * from, 2 * from, from}, {columns * channels, channels},
             {4 * to, 2 * to, to}, {rows * channels, channels}};
  transform(m, x, out, &t);
  free(m), free(x), free(out);
}

int main(void) {
  for (long k = WIDTH; k <= 7 * WIDTH; k += WIDTH)
    for (long n = 1; n < 3; n++)
      for (long h = 2; h < 11; h++)
        for (long w = 2; w < 11; w++) {
          pool((Image){n, h, w, k});
          for (long c = 1; c < 5; c++)
            for (long side = 1; side < 6; side++)
              if (h > side && w > side) conv((Conv){n, h, w, c, side, k});
        }
  for (long rows = 1; rows <= MOST; rows++)
    for (long columns = 1; columns <= MOST; columns++)
      for (long add = 0; add < 2; add++) tiles(rows, columns, 2 * WIDTH, add);
  puts("clean");
  return 0;
}
