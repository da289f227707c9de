// Linear layers over packed weights, each with what follows it folded into the store.
#pragma once

#include "matmul.h"
#include "team.h"

struct Linear {
  const uint32_t *packed;  // strips of columns, see matmul.h
  const float *bias;       // in the order of the packed columns, or null
  int64_t inputs, outputs;
  int64_t gated;  // each strip holds as many gate columns as up columns; outputs counts one of them
};

enum class Then {
  STORE,  // out = y
  ADD,    // out += y
  GATE,   // out = silu(gate) * up
};

constexpr int64_t PANEL = 96;  // rows that share a thread's cache while strips pass by
static_assert(PANEL % TILE_ROWS<1> == 0);

inline int64_t num_strips(int64_t outputs, bool gated) {
  int64_t columns = gated ? STRIP / 2 : STRIP;
  return (outputs + columns - 1) / columns;
}

// The row of the weight matrix that becomes column j of a strip; -1: padding.
inline int64_t source_row(int64_t strip, int64_t j, int64_t outputs, bool gated) {
  int64_t half = STRIP / 2;
  int64_t row = !gated ? strip * STRIP + j : strip * half + j % half;
  if (row >= outputs) return -1;
  return gated && j >= half ? outputs + row : row;
}

template <class T>
void pack(const T *weight, const float *bias, int64_t inputs, int64_t outputs, bool gated,
          uint32_t *packed, float *packed_bias) {
  const int64_t k = words<T>(inputs);
#pragma omp parallel for
  for (int64_t strip = 0; strip < num_strips(outputs, gated); strip++) {
    for (int64_t j = 0; j < STRIP; j++) {
      int64_t row = source_row(strip, j, outputs, gated);
      uint32_t *to = packed + strip * k * STRIP + j;
      for (int64_t i = 0; i < k; i++) {
        if (row < 0) to[i * STRIP] = 0;
        else memcpy(to + i * STRIP, weight + row * inputs + i * PACK<T>, 4);
      }
      if (bias) packed_bias[strip * STRIP + j] = row < 0 ? 0 : bias[row];
    }
  }
}

INLINE Vec silu(Vec x) {
  Vec power = min(max(x * -1.44269504f, splat(-126.f)), splat(126.f));
  return x / (exp2<float>(power) + 1.f);
}

// From sums [rows][STRIP] to where they belong.
template <Then then, class Out>
void finish(const float *sums, const float *bias, int64_t rows, int64_t column, int64_t outputs,
            Out *out) {
  const Vec left_bias = bias ? load<Vec>(bias) : Vec{};
  const Vec right_bias = bias ? load<Vec>(bias + W) : Vec{};
  const int left = (int)std::clamp<int64_t>(outputs - column, 0, W);
  const int right = (int)std::clamp<int64_t>(outputs - column - W, 0, W);
  for (int64_t r = 0; r < rows; r++, sums += STRIP, out += outputs) {
    Vec a = load<Vec>(sums) + left_bias, b = load<Vec>(sums + W) + right_bias;
    Out *to = out + column;
    if constexpr (then == Then::GATE) {
      store_floats(to, silu(a) * b, left);
    } else {
      if constexpr (then == Then::ADD) a += load_floats(to, left);
      store_floats(to, a, left);
      if (!right) continue;
      if constexpr (then == Then::ADD) b += load_floats(to + W, right);
      store_floats(to + W, b, right);
    }
  }
}

// x [rows][inputs] -> out [rows][outputs]
template <class T, Then then, class Out>
void linear(Team &team, const Linear &w, const T *x, int64_t rows, Out *out) {
  const int64_t k = words<T>(w.inputs), panels = (rows + PANEL - 1) / PANEL;
  auto panel = [&](int64_t i) { return std::min(rows, round_up(rows * i / panels, TILE_ROWS<1>)); };
  const int64_t columns = then == Then::GATE ? W : STRIP;  // of out, to a strip
  const int64_t strips = num_strips(w.outputs, w.gated), tasks = strips * panels;
  team.share(tasks, team.pieces(tasks, 1), [&](int64_t begin, int64_t end) {
    alignas(CACHE_LINE) float sums[PANEL * STRIP];
    for (int64_t i = begin; i < end; i++) {
      const int64_t strip = i % strips, first = panel(i / strips);
      const int64_t n = panel(i / strips + 1) - first;
      matmul<T>(n, 1, (const uint32_t *)(x + first * w.inputs), k, w.packed + strip * k * STRIP,
                k * STRIP, k, sums, STRIP, false, true);
      finish<then>(sums, w.bias ? w.bias + strip * STRIP : nullptr, n, strip * columns, w.outputs,
                   out + first * w.outputs);
    }
  });
}
