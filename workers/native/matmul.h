// The matrix kernel: a few rows times a strip of columns, everything in registers.
//
// B is packed in strips of STRIP columns, [strip][k][STRIP] words, so that it is read in the order in
// which it lies in memory. An output element is one chain of additions over k, in order, whatever the
// shape of the call: a row's result does not depend on the rows beside it.
#pragma once

#include "vec.h"

constexpr int STRIP = 2 * W;  // columns

// Rows whose sums fit the registers beside a strip's row.
constexpr int TILE_ROWS = W == 16 ? 12 : 4;

// What is read next, so that it comes from memory while the rows at hand are multiplied: `step` bytes
// with each of their columns.
struct Ahead {
  const char *data;
  int64_t step;
};

// C[R][STRIP] = (add ? C : 0) + A[R][k] B[k][STRIP]; lda and k in words, ldc in floats.
template <class T, int R>
void tile(const uint32_t *a, int64_t lda, const uint32_t *b, int64_t k, float *c, int64_t ldc,
          bool add, Ahead ahead) {
  Vec sums[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    sums[r][0] = add ? load<Vec>(c + r * ldc) : Vec{};
    sums[r][1] = add ? load<Vec>(c + r * ldc + W) : Vec{};
  }
  for (int64_t i = 0; i < k; i++) {
    __builtin_prefetch(ahead.data + i * ahead.step, 0, 2);
    const Bits left = load<Bits>(b + i * STRIP), right = load<Bits>(b + i * STRIP + W);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Bits x = splat_word(a + r * lda + i);
      sums[r][0] = dot<T>(sums[r][0], x, left);
      sums[r][1] = dot<T>(sums[r][1], x, right);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++) {
    store(c + r * ldc, sums[r][0]);
    store(c + r * ldc + W, sums[r][1]);
  }
}

template <class T, int R>
void tile_of(int64_t rows, const uint32_t *a, int64_t lda, const uint32_t *b, int64_t k, float *c,
             int64_t ldc, bool add, Ahead ahead) {
  if (rows == R) tile<T, R>(a, lda, b, k, c, ldc, add, ahead);
  else if constexpr (R > 1) tile_of<T, R - 1>(rows, a, lda, b, k, c, ldc, add, ahead);
}

// Any number of rows times one strip. The next strip, if that is what comes next, lies behind it.
template <class T>
void matmul(int64_t rows, const uint32_t *a, int64_t lda, const uint32_t *b, int64_t k, float *c,
            int64_t ldc, bool add, bool next_strip = false) {
  const int64_t num_tiles = (rows + TILE_ROWS - 1) / TILE_ROWS, strip_bytes = k * STRIP * 4;
  for (int64_t t = 0; t < num_tiles; t++) {
    const int64_t first = rows * t / num_tiles, n = rows * (t + 1) / num_tiles - first;  // even sizes
    Ahead ahead = {(const char *)b, 0};
    if (next_strip && num_tiles > 1)
      ahead = {(const char *)b + strip_bytes + strip_bytes * t / num_tiles,
               (int64_t)(STRIP * 4 / num_tiles)};
    tile_of<T, TILE_ROWS>(n, a + first * lda, lda, b, k, c + first * ldc, ldc, add, ahead);
  }
}
