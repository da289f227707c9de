// The matrix kernel: a few rows times a strip of columns, everything in registers.
//
// B is packed in strips of STRIP columns, [strip][k][STRIP] words, and so read in the order in which
// it lies in memory. An output element is one chain of additions over k, in order, whatever the
// shape of the call: a row's result does not depend on the rows beside it.
#pragma once

#include "vec.h"

constexpr int STRIP = 2 * W;  // columns
constexpr int64_t LINE = 64;  // bytes

// Rows of a tile, so that its sums fit the registers beside a row of B: one strip wide, or two.
template <int Strips>
constexpr int TILE_ROWS = (W == 16 ? 12 : 6) / Strips;

// Where to find what is multiplied. Addresses and distances in words; those of sums in floats.
struct Product {
  const uint32_t *a;
  int64_t a_row;
  const uint32_t *b;
  int64_t b_strip;
  int64_t k;
  float *sums;
  int64_t sums_row;
  bool add;  // to what is there
  // What is read next, so that it comes from memory meanwhile: up to two lines with each of the k.
  const char *ahead;
  int64_t ahead_step;
};

template <class T, int R, int Strips>
void tile(const Product &p) {
  constexpr int V = 2 * Strips;
  Vec sums[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      sums[r][v] = p.add ? load<Vec>(p.sums + r * p.sums_row + v * W) : Vec{};
  const uint32_t *a = p.a, *b = p.b;
  const char *ahead = p.ahead;
  for (int64_t i = 0; i < p.k; i++, b += STRIP, ahead += p.ahead_step) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + LINE, 0, 2);
    Bits column[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) column[v] = load<Bits>(b + v / 2 * p.b_strip + v % 2 * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
      const Bits x = splat_word(a + r * p.a_row + i);
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[r][v] = dot<T>(sums[r][v], x, column[v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(p.sums + r * p.sums_row + v * W, sums[r][v]);
}

template <class T, int R, int Strips>
void tile_of(int64_t rows, const Product &p) {
  if (rows == R) tile<T, R, Strips>(p);
  else if constexpr (R > 1) tile_of<T, R - 1, Strips>(rows, p);
}

// Any number of rows times so many strips, p.sums side by side.
template <class T, int Strips>
void tiles(int64_t rows, Product p, bool next_strip) {
  const int64_t num_tiles = (rows + TILE_ROWS<Strips> - 1) / TILE_ROWS<Strips>;
  const int64_t bytes = Strips * p.b_strip * 4;
  const Product first = p;
  for (int64_t t = 0; t < num_tiles; t++) {
    const int64_t row = rows * t / num_tiles, n = rows * (t + 1) / num_tiles - row;
    p.a = first.a + row * p.a_row;
    p.sums = first.sums + row * p.sums_row;
    if (next_strip && rows > TILE_ROWS<2>) {  // with fewer, the processor's own guess does better
      p.ahead = (const char *)p.b + bytes + bytes * t / num_tiles;
      p.ahead_step = Strips * STRIP * 4 / num_tiles;
    }
    tile_of<T, TILE_ROWS<Strips>, Strips>(n, p);
  }
}

// sums [rows][num_strips * STRIP] = (add ? sums : 0) + a [rows][k] times strips of b.
template <class T>
void matmul(int64_t rows, int64_t num_strips, const uint32_t *a, int64_t a_row, const uint32_t *b,
            int64_t b_strip, int64_t k, float *sums, int64_t sums_row, bool add,
            bool next_strip = false) {
  Product p = {a, a_row, b, b_strip, k, sums, sums_row, add, (const char *)b, 0};
  for (; num_strips > 0;) {
    const bool wide = W == 16 && num_strips > 1 && rows <= TILE_ROWS<2>;
    if (wide) tiles<T, 2>(rows, p, next_strip);
    else tiles<T, 1>(rows, p, next_strip);
    p.b += (1 + wide) * b_strip;
    p.sums += (1 + wide) * STRIP;
    num_strips -= 1 + wide;
  }
}
