// What happens to rows between matrices: norms, rotary embedding, the way into the cache.
#pragma once

#include <cmath>

#include "pages.h"
#include "team.h"
#include "vec.h"

// n elements; in place is fine. Rounds where transformers rounds: after the scaling, and again.
template <class T>
void norm_row(const T *x, const T *weight, T *out, int64_t n, float eps) {
  Vec squares = {};
  for (int64_t i = 0; i < n; i += W) {
    Vec v = load_floats(x + i, (int)std::min<int64_t>(W, n - i));
    squares += v * v;
  }
  const Vec scale = splat(1.f / std::sqrt(sum(squares) / (float)n + eps));
  for (int64_t i = 0; i < n; i += W) {
    int k = (int)std::min<int64_t>(W, n - i);
    Vec v = load_floats(x + i, k) * scale;
    if constexpr (sizeof(T) == 2) v = widen(narrow(v));
    store_floats(out + i, v * load_floats(weight + i, k), k);
  }
}

template <class T>
void norm(Team &team, const T *x, const T *weight, T *out, int64_t rows, int64_t n, float eps) {
  team.share(rows, team.pieces(rows, 4), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) norm_row(x + r * n, weight, out + r * n, n, eps);
  });
}

// The index of the largest of n > 0 floats, the first of equal ones. NaN is never the largest.
inline int64_t argmax_row(const float *x, int64_t n) {
  constexpr int64_t BLOCK = 64 * W;
  float largest = -INFINITY;
  int64_t block = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t end = std::min(n, begin + BLOCK);
    Vec most = splat(-INFINITY);
    int64_t i = begin;
    for (; i + W <= end; i += W) most = max(load<Vec>(x + i), most);
    float here = max(most);
    for (; i < end; i++) here = x[i] > here ? x[i] : here;
    if (here > largest) largest = here, block = begin;
  }
  while (block < n - 1 && !(x[block] == largest)) block++;
  return block;
}

// Rotates pairs (i, i + n / 2). cos and sin: [n / 2]. `from` may be `to`.
template <class T>
void rotate_row(const T *from, const float *cos, const float *sin, T *to, int64_t n) {
  const int64_t half = n / 2;
  for (int64_t i = 0; i < half; i += W) {
    int k = (int)std::min<int64_t>(W, half - i);
    Vec c = load_floats(cos + i, k), s = load_floats(sin + i, k);
    Vec a = load_floats(from + i, k), b = load_floats(from + half + i, k);
    store_floats(to + i, a * c - b * s, k);
    store_floats(to + half + i, b * c + a * s, k);
  }
}

struct HeadNorms {  // of queries and keys; null where the model has none
  const void *query, *key;
  float eps;
};

// Rows of qkv, [heads + 2 * kv_heads][head_dim]: rotates the queries in place, and puts rotated
// keys, and values, in their pages.
template <class T>
void rotate_and_store(Team &team, const Pages<T> &pages, const Batch &batch, const int64_t *slots,
                      int64_t layer, int64_t heads, const HeadNorms &norms, T *qkv) {
  const int64_t d = pages.head_dim, kv_heads = pages.heads;
  const int64_t width = (heads + 2 * kv_heads) * d;
  auto rotate = [&](int64_t row, const T *from, const void *weight, T *to) {
    if (weight) norm_row(from, (const T *)weight, to, d, norms.eps);
    const float *angles = batch.rotation + row * d;
    rotate_row(weight ? to : from, angles, angles + d / 2, to, d);
  };
  team.share(batch.num_tokens, team.pieces(batch.num_tokens, 4), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      T *q = qkv + row * width, *k = q + heads * d, *v = k + kv_heads * d;
      for (int64_t h = 0; h < heads; h++) rotate(row, q + h * d, norms.query, q + h * d);
      for (int64_t h = 0; h < kv_heads; h++) {
        T *slot = pages.at(layer, h, slots[row]);
        rotate(row, k + h * d, norms.key, slot);
        memcpy(slot + pages.to_value, v + h * d, d * sizeof(T));
      }
    }
  });
}
