// A vector of floats, in the compiler's own vector types.
//
// Everything above this file is written once. The compiler flags decide what a Vec is: 16 floats
// with AVX-512, 8 with AVX2, 4 anywhere else. Intrinsics appear only where the vector types have no
// word for what the machine can do.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes of a Vec
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Ints __attribute__((vector_size(W * 4)));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));
typedef uint16_t Halves __attribute__((vector_size(W * 2)));  // W bf16
typedef uint16_t Pairs __attribute__((vector_size(W * 4)));   // W words of two bf16

struct bf16 {
  uint16_t bits;
};

// A word is 32 bits: one float, or two neighbouring bf16. Matrix kernels count in words, so that
// one source serves both types: a lane of a Bits vector holds one word.
template <class T>
constexpr int PACK = 4 / sizeof(T);  // elements in a word

template <class T>
constexpr int64_t words(int64_t elements) {
  return (elements + PACK<T> - 1) / PACK<T>;
}

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// ------------------------------------------------------------------ memory

template <class V>
INLINE V load(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
INLINE void store(void *to, V v) {
  memcpy(to, &v, sizeof v);
}

// The first n words at `from`, zeros behind them; nothing past them is read.
INLINE Bits load_words(const void *from, int n) {
  if (n >= W) return load<Bits>(from);
#if defined(__AVX512F__)
  return (Bits)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), from);
#else
  Bits v = {};
  memcpy(&v, from, n * 4);
  return v;
#endif
}

template <int... I>
constexpr Ints lanes(std::integer_sequence<int, I...>) {
  return Ints{I...};
}
constexpr Ints LANES = lanes(std::make_integer_sequence<int, W>());  // 0, 1, 2, ...

INLINE Vec splat(float x) { return x - Vec{}; }
INLINE Bits splat_word(const void *from) {
  uint32_t x;
  memcpy(&x, from, 4);
  return x - Bits{};
}

// ------------------------------------------------------------------ bf16

INLINE Vec widen(Halves h) { return (Vec)(__builtin_convertvector(h, Bits) << 16); }

// Round to nearest even, as torch does.
INLINE Halves narrow(Vec v) {
#if defined(__AVX512BF16__)
  return (Halves)_mm512_cvtneps_pbh(v);
#else
  Bits bits = (Bits)v;
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits nan = (Bits)(v != v);
  return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Halves);
#endif
}

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// n elements as floats, zeros behind them.
INLINE Vec load_floats(const float *from, int n) {
  return (Vec)load_words(from, n);
}
INLINE Vec load_floats(const bf16 *from, int n) {
  if (n >= W) return widen(load<Halves>(from));
  Halves h = {};
  memcpy(&h, from, n * sizeof(bf16));
  return widen(h);
}

INLINE void store_floats(float *to, Vec v, int n) {
  if (n >= W) return store(to, v);
  memcpy(to, &v, n * sizeof(float));
}
INLINE void store_floats(bf16 *to, Vec v, int n) {
  Halves h = narrow(v);
  if (n >= W) return store(to, h);
  memcpy(to, &h, n * sizeof(bf16));
}

// ------------------------------------------------------------------ arithmetic

INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

// sum + the dot product of two words, in each lane.
template <class T>
INLINE Vec dot(Vec sum, Bits a, Bits b) {
  if constexpr (sizeof(T) == 4) {
    return sum + (Vec)a * (Vec)b;
  } else {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
    sum += (Vec)(a << 16) * (Vec)(b << 16);
    return sum + (Vec)(a & 0xffff0000u) * (Vec)(b & 0xffff0000u);
#endif
  }
}

// 2^x for |x| <= 126, exact at 0. Off by at most 2 ulp, or 4e-6 where bf16 is made of it.
template <class T>
INLINE Vec exp2(Vec x) {
  const Vec shift = splat(12582912.f);  // 1.5 * 2^23: the sum's last bits are round(x)
  Vec shifted = x + shift;
  Vec f = x - (shifted - shift);  // in [-1/2, 1/2]
  Vec p;
  if constexpr (sizeof(T) == 4) {
    p = splat(1.534581039e-4f);
    p = p * f + 1.339993121e-3f;
    p = p * f + 9.618488963e-3f;
    p = p * f + 5.550328777e-2f;
    p = p * f + 2.402264689e-1f;
    p = p * f + 6.931472057e-1f;
  } else {
    p = splat(9.570100018e-3f);
    p = p * f + 5.591786017e-2f;
    p = p * f + 2.402474487e-1f;
    p = p * f + 6.931218148e-1f;
  }
  p = p * f + 1.f;
  return (Vec)((Bits)p + ((Bits)shifted << 23));
}

// ------------------------------------------------------------------ lanes

// out[i] = (a followed by b)[Pattern::at(i)]
template <class Pattern, class V, int... I>
INLINE V shuffle(V a, V b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Pattern::at(I)...);
#else
  using Index = std::conditional_t<sizeof(a[0]) == 2, uint16_t, int32_t>;
  typedef Index Mask __attribute__((vector_size(sizeof(V))));
  return __builtin_shuffle(a, b, Mask{(Index)Pattern::at(I)...});
#endif
}

template <class Pattern, class V>
INLINE V shuffle(V a, V b) {
  return shuffle<Pattern>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>());
}

template <int S>
struct Swapped {  // neighbours at distance S change places
  static constexpr int at(int i) { return i ^ S; }
};
template <int S>
struct FromLow {  // rows i and i + S of a matrix exchange a quarter: the upper row's
  static constexpr int at(int i) { return i & S ? W + i - S : i; }
};
template <int S>
struct FromHigh {  // and the lower row's
  static constexpr int at(int i) { return i & S ? W + i : i + S; }
};
template <int Half>
struct Zipped {  // a0 b0 a1 b1 ..., of the first or second half of 2 * W elements
  static constexpr int at(int i) { return Half * W + i / 2 + (i & 1 ? 2 * W : 0); }
};

template <int S = W / 2>
INLINE float sum(Vec v) {
  if constexpr (S == 0) {
    return v[0];
  } else {
    return sum<S / 2>(v + shuffle<Swapped<S>>(v, v));
  }
}

template <int S = W / 2>
INLINE float max(Vec v) {
  if constexpr (S == 0) {
    return v[0];
  } else {
    return max<S / 2>(max(v, shuffle<Swapped<S>>(v, v)));
  }
}

// Whether a comparison holds in some lane.
INLINE bool any(Ints comparison) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)comparison);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)comparison);
#else
  Ints pairs = comparison | shuffle<Swapped<2>>(comparison, comparison);
  return pairs[0] | pairs[1];
#endif
}

// Transpose W rows of W words: log2(W) rounds in which blocks off the diagonal change places.
template <int S = W / 2>
INLINE void transpose(Bits (&r)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & S) continue;
    Bits low = shuffle<FromLow<S>>(r[i], r[i + S]), high = shuffle<FromHigh<S>>(r[i], r[i + S]);
    r[i] = low;
    r[i + S] = high;
  }
  if constexpr (S > 1) transpose<S / 2>(r);
}
