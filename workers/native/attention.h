// Causal attention of a mixed batch, straight over pages.
//
// A query row's result depends on its own query, keys and values and on nothing else, bit for bit:
// not on the chunk it came in, the rows beside it, the number of threads or the page size. Keys are
// taken in tiles of TILE, whose borders are multiples of TILE from the start of the sequence, by an
// online softmax; every SEGMENT keys it starts afresh, and segments are merged in order. Hence a
// long context may be split among threads between any two segments.
//
//   keys   0 ....... 63 | 64 ..... 127 | ... | ..... 255 || 256 ...        | tile, || segment
//
// What lies behind a context in its last page is never read.
#pragma once

#include <cmath>

#include "matmul.h"
#include "schedule.h"
#include "team.h"

constexpr int TILE = 64;  // keys
constexpr int MAX_HEAD_DIM = 256;
constexpr float SLACK = 8;
static_assert(SEGMENT % TILE == 0);

// ------------------------------------------------------------------ rows under way

// The online softmax of some rows.
struct Rows {
  float *outputs;  // [rows][dims], unnormalised
  Vec *sums;       // of weights, lane by lane
  float *tops;     // scores near the greatest so far

  Rows from(int64_t row, int64_t dims) const {
    return {outputs + row * dims, sums + row, tops + row};
  }

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

// Scores [TILE] of one row, of which it sees the first `count`, to weights.
//
// Weights are powers of two above `top`. As long as no score is far above it, it stays, and with it
// what has been added up: SLACK keeps weights below 2^8, of the same precision as those below 1.
template <class T>
INLINE void soften(const float *scores, int count, float scale, T *weights, float *output,
                   int64_t dims, Vec &sum, float &top) {
  if (count <= 0) {
    memset(weights, 0, TILE * sizeof(T));
    return;
  }
  Vec x[TILE / W];
  Vec highest = splat(-INFINITY);
#pragma GCC unroll 16
  for (int v = 0; v < TILE / W; v++) {
    x[v] = load<Vec>(scores + v * W);
    if (count < (v + 1) * W) x[v] = LANES < count - v * W ? x[v] : splat(-INFINITY);
    highest = max(highest, x[v]);
  }
  const Vec least = splat(-126.f);
  if (any(highest * scale > splat(top * scale + SLACK))) {
    const float new_top = max(highest);
    const Vec shrink = exp2<float>(max(splat((top - new_top) * scale), least));
    for (int64_t d = 0; d < dims; d += W) store(output + d, load<Vec>(output + d) * shrink);
    sum *= shrink;
    top = new_top;
  }
  const Vec offset = splat(top * scale);
#pragma GCC unroll 16
  for (int v = 0; v < TILE / W; v++) {
    Vec e = exp2<T>(max(x[v] * scale - offset, least));
    if (count < (v + 1) * W) e = LANES < count - v * W ? e : Vec{};
    sum += e;
    store_floats(weights + v * W, e, W);
  }
}

// ------------------------------------------------------------------ one tile of keys

// Where they lie for kv head 0.
template <class T>
struct Tile {
  int first, count;
  const T *keys[TILE];  // one past the tile's end is its last: always a valid address

  void find(const Pages<T> &pages, int64_t layer, const int32_t *numbers, int begin, int end) {
    first = begin;
    count = std::min(TILE, end - begin);
    int64_t page = begin / pages.page_size, offset = begin % pages.page_size;
    for (int i = 0; i < count; page++, offset = 0) {
      const T *key = pages.page(layer, 0, numbers[page]) + offset * pages.head_dim;
      for (; offset < pages.page_size && i < count; offset++, i++, key += pages.head_dim)
        keys[i] = key;
    }
    for (int i = count; i < TILE; i++) keys[i] = keys[count - 1];
  }
};

// The same for another head.
template <class T>
struct HeadTile {
  const Tile<T> &tile;
  const int64_t to_head, count = tile.count;

  const T *key(int i) const { return tile.keys[i] + to_head; }
};

// A piece of a row of values as words: PACK * W dims of PACK neighbouring keys, zeros where no dims
// are left.
template <class T>
INLINE void value_words(const T *a, const T *b, int64_t left, Bits (&out)[PACK<T>]) {
  if constexpr (sizeof(T) == 4) {
    out[0] = load_words(a, (int)std::clamp<int64_t>(left, 0, W));
  } else {
    const int n = (int)std::clamp<int64_t>(left / 2, 0, W);
    Pairs x = (Pairs)load_words(a, n), y = (Pairs)load_words(b, n);
    out[0] = (Bits)shuffle<Zipped<0>>(x, y);
    out[1] = (Bits)shuffle<Zipped<1>>(x, y);
  }
}

// ------------------------------------------------------------------ keys and values as matrices
// Each loop asks, with every piece of a row, for the same piece of the next tile's row.

template <class T>
INLINE void prefetch(const HeadTile<T> &next, int i, int64_t offset) {
  __builtin_prefetch(next.key(i) + offset, 0, 2);
}

// What the loops do not come to, of a next tile with more keys than this one.
template <class T>
void prefetch_rest(const Pages<T> &pages, const HeadTile<T> &tile, const HeadTile<T> &next) {
  for (int i = tile.count; i < next.count; i++)
    for (int64_t d = 0; d < pages.head_dim; d += LINE / (int64_t)sizeof(T)) {
      prefetch(next, i, d);
      prefetch(next, i, pages.to_value + d);
    }
}

// Keys as the right side of a product: strips of keys, [strip][dim words][STRIP].
template <class T>
void pack_keys(const Pages<T> &pages, const HeadTile<T> &tile, const HeadTile<T> &next,
               int64_t dim_words, uint32_t *packed) {
  const int64_t used = words<T>(pages.head_dim);
  for (int g = 0; g < tile.count; g += W) {
    uint32_t *to = packed + g / STRIP * dim_words * STRIP + g % STRIP;
    for (int64_t d = 0; d < dim_words; d += W) {
      Bits r[W];
      const int n = (int)std::min<int64_t>(W, used - d);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        r[i] = load_words(tile.key(g + i) + d * PACK<T>, n);
        prefetch(next, g + i, d * PACK<T>);
      }
      transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(to + (d + i) * STRIP, r[i]);
    }
  }
}

// Values likewise: strips of dims, [strip][words of keys][STRIP].
template <class T>
void pack_values(const Pages<T> &pages, const HeadTile<T> &tile, const HeadTile<T> &next,
                 int64_t dims, uint32_t *packed) {
  constexpr int P = PACK<T>;
  for (int i = 0; i < tile.count; i += P) {
    const T *a = tile.key(i) + pages.to_value, *b = tile.key(i + P - 1) + pages.to_value;
    for (int64_t d = 0; d < dims; d += P * W) {
      Bits x[P];
      value_words(a + d, b + d, pages.head_dim - d, x);
      uint32_t *to = packed + (d / STRIP * (TILE / P) + i / P) * STRIP + d % STRIP;
      for (int p = 0; p < P; p++) {
        store(to + p * W, x[p]);
        prefetch(next, i + p, pages.to_value + d);
      }
    }
  }
}

// outputs [R][dims] += weights [R][TILE] x values, where packing would cost more than it saves:
// V vectors of dims, from dim d.
template <class T, int R, int V>
void add_values(const Pages<T> &pages, const HeadTile<T> &tile, const HeadTile<T> &next,
                const T *weights, float *outputs, int64_t dims, int64_t d) {
  constexpr int P = PACK<T>;
  Vec sums[R][V];
#pragma GCC unroll 8
  for (int j = 0; j < R; j++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) sums[j][v] = load<Vec>(outputs + j * dims + d + v * W);
  for (int i = 0; i < tile.count; i += P) {
    const T *a = tile.key(i) + pages.to_value + d, *b = tile.key(i + P - 1) + pages.to_value + d;
#pragma GCC unroll 4
    for (int v = 0; v < V; v += P) {
      Bits x[P];
      value_words(a + v * W, b + v * W, pages.head_dim - d - v * W, x);
#pragma GCC unroll 8
      for (int j = 0; j < R; j++) {
        const Bits weight = splat_word(weights + j * TILE + i);
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) sums[j][v + p] = dot<T>(sums[j][v + p], weight, x[p]);
      }
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) prefetch(next, i + p, pages.to_value + d + v * W);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < R; j++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) store(outputs + j * dims + d + v * W, sums[j][v]);
}

template <class T, int R>
void add_values_of(int64_t rows, const Pages<T> &pages, const HeadTile<T> &tile,
                   const HeadTile<T> &next, const T *weights, float *outputs, int64_t dims) {
  if (rows == R) {
    constexpr int V = W == 16 && R <= 4 ? 4 : 2;  // as many sums as fit the registers
    int64_t d = 0;
    for (; d + V * W <= dims; d += V * W)
      add_values<T, R, V>(pages, tile, next, weights, outputs, dims, d);
    if (d < dims) add_values<T, R, 2>(pages, tile, next, weights, outputs, dims, d);
  } else if constexpr (R > 1) {
    add_values_of<T, R - 1>(rows, pages, tile, next, weights, outputs, dims);
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
  Tile<T> tiles[2];  // this one and the next
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
        // items are dealt out in turn, so this thread's next is probably so many further on
        attend(item, schedule.items[std::min(i + team.size, num_items - 1)], desk);
        if (item.group < 0) write(item, desk.rows(0));
        else keep(item, desk);
      }
    });
  }

  // Leaves the item's result in desk.rows(0), head by head.
  void attend(const Item &item, const Item &next_item, Desk<T> &desk) {
    const Span &span = batch.spans[item.span];
    const int64_t rows = item.num_tokens * per_head, all_rows = item.num_heads * rows;
    read_queries(item, desk.q);
    const int first_limit = span.context - span.length + item.first_token + 1;  // keys row 0 sees
    Tile<T> *tile = &desk.tiles[0], *next = &desk.tiles[1];
    find(item, item.begin, *next);
    for (int begin = item.begin; begin < item.end; begin += TILE) {
      std::swap(tile, next);
      const bool more = begin + TILE < item.end;
      if (more) find(item, begin + TILE, *next);
      else find(next_item, next_item.begin, *next);
      const int segment = begin / SEGMENT > item.begin / SEGMENT;
      const Rows state = desk.rows(segment);
      if (begin == item.begin || begin % SEGMENT == 0) desk.rows(segment).clear(all_rows, dims);
      for (int h = 0; h < item.num_heads; h++) {
        const int64_t head = item.first_head + h;
        const bool last = h + 1 == item.num_heads;
        const int64_t head_after = last ? (more ? item : next_item).first_head : head + 1;
        const HeadTile<T> after{last ? *next : *tile, head_after * pages.head_stride};
        step({*tile, head * pages.head_stride}, after, rows, first_limit, desk,
             desk.q + h * rows * dim_words * PACK<T>, state.from(h * rows, dims));
      }
      if (segment && (!more || (begin + TILE) % SEGMENT == 0))
        for (int64_t r = 0; r < all_rows; r++)
          merge_row(desk.outputs[0] + r * dims, desk.sums[0][r], desk.tops[0][r],
                    desk.outputs[1] + r * dims, desk.sums[1][r], desk.tops[1][r], dims, scale);
    }
  }

 private:
  void find(const Item &item, int begin, Tile<T> &tile) {
    tile.find(pages, layer, batch.pages + batch.spans[item.span].first_page, begin, item.end);
  }

  // Rows of an item are (kv head, token, query head); behind head_dim they hold zeros.
  void read_queries(const Item &item, T *to) {
    memset(to, 0, item.num_heads * item.num_tokens * per_head * dim_words * 4);
    each_row(item, [&](int64_t r, int64_t token, int64_t head) {
      memcpy(to + r * dim_words * PACK<T>, q + token * q_stride + head * head_dim,
             head_dim * sizeof(T));
    });
  }

  // f(row of the item, token of the batch, query head)
  template <class F>
  void each_row(const Item &item, F f) {
    const int64_t first = batch.spans[item.span].start + item.first_token;
    int64_t row = 0;
    for (int64_t h = item.first_head; h < item.first_head + item.num_heads; h++)
      for (int64_t t = 0; t < item.num_tokens; t++)
        for (int64_t i = 0; i < per_head; i++) f(row++, first + t, h * per_head + i);
  }

  void step(const HeadTile<T> &tile, const HeadTile<T> &next, int64_t rows, int first_limit,
            Desk<T> &desk, const T *queries, Rows state) {
    prefetch_rest(pages, tile, next);
    pack_keys(pages, tile, next, dim_words, desk.keys);
    matmul<T>(rows, (tile.count + STRIP - 1) / STRIP, (const uint32_t *)queries, dim_words,
              desk.keys, dim_words * STRIP, dim_words, desk.scores, TILE, false);
    soften_all(tile.tile, rows, first_limit, desk, state);
    if (rows <= FEW_ROWS) {
      add_values_of<T, FEW_ROWS>(rows, pages, tile, next, desk.weights, state.outputs, dims);
      return;
    }
    pack_values(pages, tile, next, dims, desk.values);
    constexpr int64_t key_words = TILE / PACK<T>;
    matmul<T>(rows, dims / STRIP, (const uint32_t *)desk.weights, key_words, desk.values,
              key_words * STRIP, words<T>(tile.count), state.outputs, dims, true);
  }

  void soften_all(const Tile<T> &tile, int64_t rows, int first_limit, Desk<T> &desk, Rows state) {
    for (int64_t r = 0; r < rows; r++) {
      const int sees = first_limit + (int)(r / per_head) - tile.first;
      soften(desk.scores + r * TILE, std::min(sees, tile.count), scale, desk.weights + r * TILE,
             state.outputs + r * dims, dims, state.sums[r], state.tops[r]);
    }
  }

  void write(const Item &item, Rows rows) {
    each_row(item, [&](int64_t r, int64_t token, int64_t head) {
      T *to = out + (token * pages.heads * per_head + head) * head_dim;
      const Vec scale_down = splat(1.f / sum(rows.sums[r]));
      for (int64_t d = 0; d < head_dim; d += W)
        store_floats(to + d, load<Vec>(rows.outputs + r * dims + d) * scale_down,
                     (int)std::min<int64_t>(W, head_dim - d));
    });
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
