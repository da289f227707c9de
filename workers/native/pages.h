// Where a sequence's keys and values lie.
#pragma once

#include <cstdint>
#include <vector>

// The pool: [page][layer][head][2: keys, values][page_size][head_dim]
struct Pool {
  void *data;
  int64_t layers, heads, page_size, head_dim;
};

// One sequence's part in a step; see workers/batch.py.
struct Span {
  int32_t start, length, context;
  int32_t first_page;  // index of its first page number in Batch.pages
};

struct Batch {
  int64_t num_tokens, num_spans;
  const int64_t *tokens;
  const Span *spans;
  const int32_t *pages;   // page numbers of all spans, one span behind the other
  const float *rotation;  // [num_tokens][head_dim]: cos of each angle, then sin
  int64_t num_wanted;
  const int64_t *wanted;  // rows whose hidden states are wanted, ascending
};

template <class T>
struct Pages {
  T *data;
  int64_t heads, page_size, head_dim;
  int64_t to_value;  // elements from a key to its value
  int64_t head_stride, layer_stride, page_stride;

  explicit Pages(const Pool &pool)
      : data((T *)pool.data),
        heads(pool.heads),
        page_size(pool.page_size),
        head_dim(pool.head_dim),
        to_value(page_size * head_dim),
        head_stride(2 * to_value),
        layer_stride(heads * head_stride),
        page_stride(pool.layers * layer_stride) {}

  T *page(int64_t layer, int64_t head, int64_t number) const {
    return data + number * page_stride + layer * layer_stride + head * head_stride;
  }

  // The key in a slot: slots are numbered page by page.
  T *at(int64_t layer, int64_t head, int64_t slot) const {
    return page(layer, head, slot / page_size) + slot % page_size * head_dim;
  }
};

// The slot of every row of the step.
inline std::vector<int64_t> slots_of(const Batch &batch, int64_t page_size) {
  std::vector<int64_t> slots(batch.num_tokens);
  for (int64_t s = 0; s < batch.num_spans; s++) {
    const Span &span = batch.spans[s];
    for (int64_t i = 0; i < span.length; i++) {
      int64_t position = span.context - span.length + i;
      int64_t page = batch.pages[span.first_page + position / page_size];
      slots[span.start + i] = page * page_size + position % page_size;
    }
  }
  return slots;
}
