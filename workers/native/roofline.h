// What the machine can do at best: the two limits that benchmarks compare with.
#pragma once

#include "team.h"
#include "vec.h"

// Reads `bytes` once. The result keeps the compiler from leaving it out.
inline float read_all(int threads, const void *data, int64_t bytes) {
  constexpr int64_t piece = 1 << 20;
  float total = 0;
  Team::run(threads, 1, [&](Team &team) {
    team.share(bytes / piece, 6 * team.size, [&](int64_t begin, int64_t end) {
      Vec sums[8] = {};
      const char *from = (const char *)data + begin * piece;
      for (int64_t i = 0; i < (end - begin) * piece; i += 8 * (int64_t)sizeof(Vec))
        for (int v = 0; v < 8; v++) sums[v] += load<Vec>(from + i + v * sizeof(Vec));
      for (int v = 1; v < 8; v++) sums[0] += sums[v];
      if (sums[0][0] == 1e30f) total = 1;
    });
  });
  return total;
}

// `rounds` times 24 independent dots on each thread; returns how many operations that was.
template <class T>
int64_t multiply(int threads, int64_t rounds) {
  float total = 0;
  Team::run(threads, 1, [&](Team &team) {
    team.share(team.size, team.size, [&](int64_t, int64_t) {
      Vec sums[24];
      for (int v = 0; v < 24; v++) sums[v] = splat((float)v);
      Bits a = splat_word(&rounds), b = a;
      for (int64_t i = 0; i < rounds; i++) {
        asm volatile("");
#pragma GCC unroll 24
        for (int v = 0; v < 24; v++) sums[v] = dot<T>(sums[v], a, b);
      }
#pragma GCC unroll 24
      for (int v = 1; v < 24; v++) sums[0] += sums[v];
      if (sums[0][0] == 1e30f) total = 1;
    });
  });
  return (int64_t)threads * rounds * 24 * W * PACK<T> * 2 + (total == 1);
}
