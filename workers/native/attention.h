// Causal attention of a mixed batch, straight over pages.
//
// A query row's result depends on its own query, keys and values and on nothing else, bit for bit:
// not on the chunk it came in, the rows beside it, the number of threads or the page size. Keys are
// taken in tiles of TILE, whose borders are multiples of TILE from the start of the sequence, by an
// online softmax; every SEGMENT keys it starts afresh, and segments are merged in order. Hence a
// long context may be split among threads between any two segments.
//
//   keys   0 ....... 63 | 64 ..... 127 | ... | ..... 255 || 256 ...        | tile, || segment
//   rows   few: a tile goes from its pages straight into registers
//          many: a tile is packed once, then two matrix products
//
// What lies behind a context in its last page is never read.
#pragma once

#include <cmath>

#include "matmul.h"
#include "schedule.h"
#include "team.h"

constexpr int TILE = 64;  // keys
constexpr int MAX_HEAD_DIM = 256;
static_assert(SEGMENT % TILE == 0);

// ------------------------------------------------------------------ rows under way

// The online softmax of some rows.
struct Rows {
  float *outputs;  // [rows][dims], unnormalised
  Vec *sums;       // of weights, lane by lane
  float *tops;     // greatest scores so far

  void clear(int64_t rows, int64_t dims) {
    memset(outputs, 0, rows * dims * sizeof(float));
    std::fill(sums, sums + rows, Vec{});
    std::fill(tops, tops + rows, -INFINITY);
  }
};

// Row += row of a later segment.
INLINE void merge_row(float *output, Vec &sum, float &top, const float *later_output, Vec later_sum,
                      float later_top, int64_t dims, float scale) {
  if (later_top == -INFINITY) return;  // the row sees none of that segment
  const float higher = std::max(top, later_top);
  const Vec least = splat(-126.f);
  const Vec a = exp2<float>(max(splat((top - higher) * scale), least));
  const Vec b = exp2<float>(max(splat((later_top - higher) * scale), least));
  for (int64_t d = 0; d < dims; d += W)
    store(output + d, load<Vec>(output + d) * a + load<Vec>(later_output + d) * b);
  sum = sum * a + later_sum * b;
  top = higher;
}

// Scores [TILE] of one row, of which it sees the first `count`, to weights; output shrinks as needed.
template <class T>
INLINE void soften(const float *scores, int count, float scale, T *weights, float *output,
                   int64_t dims, Vec &sum, float &top) {
  if (count <= 0) {
    memset(weights, 0, TILE * sizeof(T));
    return;
  }
  Vec x[TILE / W];
  Vec highest = splat(-INFINITY);
  Ints lane;
  for (int i = 0; i < W; i++) lane[i] = i;
#pragma GCC unroll 16
  for (int v = 0; v < TILE / W; v++) {
    x[v] = load<Vec>(scores + v * W);
    if (count < (v + 1) * W) x[v] = lane < count - v * W ? x[v] : splat(-INFINITY);
    highest = max(highest, x[v]);
  }
  const float new_top = std::max(top, max(highest));
  const Vec least = splat(-126.f);
  if (new_top > top) {
    const Vec shrink = exp2<float>(max(splat((top - new_top) * scale), least));
    for (int64_t d = 0; d < dims; d += W) store(output + d, load<Vec>(output + d) * shrink);
    sum *= shrink;
    top = new_top;
  }
  const Vec offset = splat(top * scale);
#pragma GCC unroll 16
  for (int v = 0; v < TILE / W; v++) {
    Vec e = exp2<T>(max(x[v] * scale - offset, least));
    if (count < (v + 1) * W) e = lane < count - v * W ? e : Vec{};
    sum += e;
    store_floats(weights + v * W, e, W);
  }
}

// ------------------------------------------------------------------ one tile of keys

template <class T>
struct Tile {
  int first, count;
  const T *keys[TILE];  // one past the tile's end is its last: always a valid address

  void find(const Pages<T> &pages, int64_t layer, int64_t head, const int32_t *numbers, int begin,
            int end) {
    first = begin;
    count = std::min(TILE, end - begin);
    int64_t page = begin / pages.page_size, offset = begin % pages.page_size;
    for (int i = 0; i < count; page++, offset = 0) {
      const T *key = pages.page(layer, head, numbers[page]) + offset * pages.head_dim;
      for (; offset < pages.page_size && i < count; offset++, i++, key += pages.head_dim)
        keys[i] = key;
    }
    for (int i = count; i < TILE; i++) keys[i] = keys[count - 1];
  }
};

// Words of values for one row of a matrix product: dims d ... d + PACK * W of PACK neighbouring keys.
template <class T>
INLINE void value_words(const T *a, const T *b, int64_t left, Bits (&out)[PACK<T>]) {
  if constexpr (sizeof(T) == 4) {
    out[0] = load_words(a, (int)std::min<int64_t>(left, W));
  } else {
    int n = (int)std::min<int64_t>(left / 2, W);
    Pairs x = (Pairs)load_words(a, n), y = (Pairs)load_words(b, n);
    out[0] = (Bits)shuffle<Zipped<0>>(x, y);
    out[1] = (Bits)shuffle<Zipped<1>>(x, y);
  }
}

template <class T>
void prefetch(const T *key, const Pages<T> &pages) {
  const char *k = (const char *)key, *v = (const char *)(key + pages.to_value);
  for (int64_t b = 0; b < pages.head_dim * (int64_t)sizeof(T); b += CACHE_LINE) {
    __builtin_prefetch(k + b);
    __builtin_prefetch(v + b);
  }
}

// ------------------------------------------------------------------ few rows

// scores [R][TILE] = q [R][dim_words] x keys, W keys at a time
template <class T, int R>
void few_scores(const Pages<T> &pages, const Tile<T> &tile, const Tile<T> *next, const uint32_t *q,
                int64_t dim_words, float *scores) {
  const int64_t used = words<T>(pages.head_dim);
  for (int g = 0; g < tile.count; g += W) {
    Vec sums[R] = {};
    for (int64_t d = 0; d < dim_words; d += W) {
      Bits r[W];
      const int n = (int)std::min<int64_t>(W, used - d);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) r[i] = load_words(tile.keys[g + i] + d * PACK<T>, n);
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
#pragma GCC unroll 8
        for (int j = 0; j < R; j++)
          sums[j] = dot<T>(sums[j], splat_word(q + j * dim_words + d + i), r[i]);
    }
    for (int j = 0; j < R; j++) store(scores + j * TILE + g, sums[j]);
    if (next)
      for (int i = 0; i < W; i++) prefetch(next->keys[g + i], pages);
  }
}

// outputs [R][dims] += weights [R][TILE] x values, a strip of dims at a time
template <class T, int R>
void few_outputs(const Pages<T> &pages, const Tile<T> &tile, const T *weights, float *outputs,
                 int64_t dims) {
  constexpr int P = PACK<T>;
  constexpr int VECS = W == 16 && R <= 4 ? 4 : 2;
  for (int64_t d = 0; d < dims; d += VECS * W) {
    Vec sums[R][VECS];
    const int vecs = (int)std::min<int64_t>(VECS, (dims - d) / W);
    for (int j = 0; j < R; j++)
      for (int v = 0; v < VECS; v++)
        sums[j][v] = v < vecs ? load<Vec>(outputs + j * dims + d + v * W) : Vec{};
    for (int i = 0; i < tile.count; i += P) {
      const T *a = tile.keys[i] + pages.to_value + d, *b = tile.keys[i + P - 1] + pages.to_value + d;
#pragma GCC unroll 4
      for (int v = 0; v < VECS; v += P) {
        Bits x[P];
        const int64_t left = pages.head_dim - d - v * W;
        if (left <= 0) break;
        value_words(a + v * W, b + v * W, left, x);
#pragma GCC unroll 8
        for (int j = 0; j < R; j++) {
          const Bits weight = splat_word(weights + j * TILE + i);
#pragma GCC unroll 2
          for (int p = 0; p < P; p++) sums[j][v + p] = dot<T>(sums[j][v + p], weight, x[p]);
        }
      }
    }
    for (int j = 0; j < R; j++)
      for (int v = 0; v < vecs; v++) store(outputs + j * dims + d + v * W, sums[j][v]);
  }
}

// ------------------------------------------------------------------ many rows

// Keys as the right side of a product: strips of keys, [strip][dim words][STRIP].
template <class T>
void pack_keys(const Pages<T> &pages, const Tile<T> &tile, int64_t dim_words, uint32_t *packed) {
  const int64_t used = words<T>(pages.head_dim);
  for (int g = 0; g < TILE; g += W) {
    uint32_t *to = packed + g / STRIP * dim_words * STRIP + g % STRIP;
    for (int64_t d = 0; d < dim_words; d += W) {
      Bits r[W];
      const int n = (int)std::min<int64_t>(W, used - d);
      for (int i = 0; i < W; i++)
        r[i] = g + i < tile.count ? load_words(tile.keys[g + i] + d * PACK<T>, n) : Bits{};
      transpose(r);
      for (int i = 0; i < W; i++) store(to + (d + i) * STRIP, r[i]);
    }
  }
}

// Values likewise: strips of dims, [strip][words of keys][STRIP].
template <class T>
void pack_values(const Pages<T> &pages, const Tile<T> &tile, int64_t dims, uint32_t *packed) {
  constexpr int P = PACK<T>;
  for (int i = 0; i < tile.count; i += P) {
    const T *a = tile.keys[i] + pages.to_value, *b = tile.keys[i + P - 1] + pages.to_value;
    for (int64_t d = 0; d < dims; d += P * W) {
      Bits x[P];
      value_words(a + d, b + d, pages.head_dim - d, x);
      uint32_t *to = packed + (d / STRIP * (TILE / P) + i / P) * STRIP + d % STRIP;
      for (int p = 0; p < P; p++) store(to + p * W, x[p]);
    }
  }
}

// ------------------------------------------------------------------ one item

// A thread's memory for the item at hand.
template <class T>
struct Desk {
  alignas(CACHE_LINE) T q[MAX_ROWS * MAX_HEAD_DIM];
  alignas(CACHE_LINE) float scores[MAX_ROWS * TILE];
  alignas(CACHE_LINE) T weights[MAX_ROWS * TILE];
  alignas(CACHE_LINE) uint32_t keys[TILE * MAX_HEAD_DIM];
  alignas(CACHE_LINE) uint32_t values[TILE * MAX_HEAD_DIM];
  alignas(CACHE_LINE) float outputs[2][MAX_ROWS * MAX_HEAD_DIM];  // of all segments, of one
  Vec sums[2][MAX_ROWS];
  float tops[2][MAX_ROWS];

  Rows rows(int i) { return {outputs[i], sums[i], tops[i]}; }
};

template <class T>
struct Attention {
  const Pages<T> pages;
  const Batch &batch;
  Schedule &schedule;
  const int64_t layer, per_head;  // query heads per kv head
  const T *q;                     // [num_tokens] rows of q_stride; heads side by side
  const int64_t q_stride;
  T *out;  // [num_tokens][heads * head_dim]
  float *partials;

  const int64_t head_dim = pages.head_dim;
  const int64_t dims = round_up(head_dim, 2 * W);          // of an output row
  const int64_t dim_words = round_up(words<T>(head_dim), W);  // of a query row
  const float scale = 1.44269504f / std::sqrt((float)head_dim);  // softmax by powers of two

  static int64_t partial_floats(int64_t head_dim) { return round_up(head_dim, 2 * W) + 2 * W; }

  void run(Team &team) {
    const int64_t num_items = schedule.items.size();
    team.share(num_items, num_items, [&](int64_t begin, int64_t end) {
      Desk<T> desk;
      for (int64_t i = begin; i < end; i++) {
        const Item &item = schedule.items[i];
        attend(item, desk);
        if (item.group < 0) write(item, desk.rows(0));
        else keep(item, desk);
      }
    });
  }

  // Leaves the item's result in desk.rows(0).
  void attend(const Item &item, Desk<T> &desk) {
    const Span &span = batch.spans[item.span];
    const int64_t rows = item.num_tokens * per_head;
    read_queries(item, desk.q);
    const int32_t *numbers = batch.pages + span.first_page;
    const int first_limit = span.context - span.length + item.first_token + 1;  // keys row 0 sees
    Tile<T> tile, next;
    next.find(pages, layer, item.head, numbers, item.begin, item.end);
    for (int begin = item.begin; begin < item.end; begin += TILE) {
      tile = next;
      const bool more = begin + TILE < item.end;
      if (more) next.find(pages, layer, item.head, numbers, begin + TILE, item.end);
      const int segment = begin / SEGMENT > item.begin / SEGMENT;
      if (begin == item.begin || begin % SEGMENT == 0) desk.rows(segment).clear(rows, dims);
      step(tile, more ? &next : nullptr, rows, first_limit, desk, desk.rows(segment));
      if (segment && (!more || (begin + TILE) % SEGMENT == 0))
        for (int64_t r = 0; r < rows; r++)
          merge_row(desk.outputs[0] + r * dims, desk.sums[0][r], desk.tops[0][r],
                    desk.outputs[1] + r * dims, desk.sums[1][r], desk.tops[1][r], dims, scale);
    }
  }

 private:
  // Rows of an item are (token, head), heads side by side; behind head_dim they hold zeros.
  void read_queries(const Item &item, T *to) {
    const int64_t first = batch.spans[item.span].start + item.first_token;
    memset(to, 0, item.num_tokens * per_head * dim_words * 4);
    for (int64_t t = 0; t < item.num_tokens; t++)
      for (int64_t h = 0; h < per_head; h++, to += dim_words * PACK<T>)
        memcpy(to, q + (first + t) * q_stride + (item.head * per_head + h) * head_dim,
               head_dim * sizeof(T));
  }

  void step(const Tile<T> &tile, const Tile<T> *next, int64_t rows, int first_limit, Desk<T> &desk,
            Rows state) {
    const uint32_t *q_words = (const uint32_t *)desk.q;
    if (rows <= FEW_ROWS) {
      few(tile, next, rows, first_limit, desk, state);
      return;
    }
    pack_keys(pages, tile, dim_words, desk.keys);
    pack_values(pages, tile, dims, desk.values);
    for (int c = 0; c < tile.count; c += STRIP)
      matmul<T>(rows, q_words, dim_words, desk.keys + c * dim_words, dim_words,
                desk.scores + c, TILE, false);
    soften_all(tile, rows, first_limit, desk, state);
    for (int64_t d = 0; d < dims; d += STRIP)
      matmul<T>(rows, (const uint32_t *)desk.weights, TILE / PACK<T>,
                desk.values + d * (TILE / PACK<T>), words<T>(tile.count), state.outputs + d, dims,
                true);
  }

  void few(const Tile<T> &tile, const Tile<T> *next, int64_t rows, int first_limit, Desk<T> &desk,
           Rows state) {
    const uint32_t *q_words = (const uint32_t *)desk.q;
    auto go = [&]<int R>(std::integral_constant<int, R>) {
      few_scores<T, R>(pages, tile, next, q_words, dim_words, desk.scores);
      soften_all(tile, rows, first_limit, desk, state);
      few_outputs<T, R>(pages, tile, desk.weights, state.outputs, dims);
    };
    switch (rows) {
      case 1: return go(std::integral_constant<int, 1>());
      case 2: return go(std::integral_constant<int, 2>());
      case 3: return go(std::integral_constant<int, 3>());
      case 4: return go(std::integral_constant<int, 4>());
      case 5: return go(std::integral_constant<int, 5>());
      case 6: return go(std::integral_constant<int, 6>());
      case 7: return go(std::integral_constant<int, 7>());
      default: return go(std::integral_constant<int, FEW_ROWS>());
    }
  }

  void soften_all(const Tile<T> &tile, int64_t rows, int first_limit, Desk<T> &desk, Rows state) {
    for (int64_t r = 0; r < rows; r++) {
      const int sees = first_limit + (int)(r / per_head) - tile.first;
      soften(desk.scores + r * TILE, std::min(sees, tile.count), scale, desk.weights + r * TILE,
             state.outputs + r * dims, dims, state.sums[r], state.tops[r]);
    }
  }

  void write(const Item &item, Rows rows) {
    const int64_t first = batch.spans[item.span].start + item.first_token;
    for (int64_t t = 0; t < item.num_tokens; t++)
      for (int64_t h = 0; h < per_head; h++) {
        const int64_t r = t * per_head + h, head = item.head * per_head + h;
        T *to = out + ((first + t) * pages.heads * per_head + head) * head_dim;
        const Vec scale_down = splat(1.f / sum(rows.sums[r]));
        for (int64_t d = 0; d < head_dim; d += W)
          store_floats(to + d, load<Vec>(rows.outputs + r * dims + d) * scale_down,
                       (int)std::min<int64_t>(W, head_dim - d));
      }
  }

  // Puts a partial result beside the others of its group; whoever brings the last one merges them.
  void keep(const Item &item, Desk<T> &desk) {
    const int64_t size = partial_floats(head_dim);
    Group &group = schedule.groups[item.group];
    for (int64_t r = 0; r < group.rows; r++) {
      float *to = partials + (item.first_slot + r) * size;
      memcpy(to, desk.outputs[0] + r * dims, dims * sizeof(float));
      store(to + dims, desk.sums[0][r]);
      to[dims + W] = desk.tops[0][r];
    }
    if (group.missing.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    group.missing = group.size;  // for the next layer
    for (int64_t r = 0; r < group.rows; r++) {
      for (int64_t i = 0; i < group.size; i++) {
        const float *from = partials + (group.first_slot + i * group.rows + r) * size;
        if (i == 0) {
          memcpy(desk.outputs[0] + r * dims, from, dims * sizeof(float));
          desk.sums[0][r] = load<Vec>(from + dims);
          desk.tops[0][r] = from[dims + W];
        } else {
          merge_row(desk.outputs[0] + r * dims, desk.sums[0][r], desk.tops[0][r], from,
                    load<Vec>(from + dims), from[dims + W], dims, scale);
        }
      }
    }
    write(item, desk.rows(0));
  }
};
