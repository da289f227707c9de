// The C interface: one transformer step of the Llama family, and its parts.
//
// No Python and no torch in here: pointers, sizes and a number of threads. Types are told apart by
// `is_bf16`; everything else of a model or a batch is in the structs.
#include <cstdlib>
#include <optional>

#include "attention.h"
#include "linear.h"
#include "roofline.h"
#include "rows.h"

struct Layer {
  const void *input_norm, *query_norm, *key_norm, *mlp_norm;
  Linear qkv, output, gate_up, down;
};

struct Model {
  int64_t is_bf16, num_layers, hidden, heads, kv_heads, head_dim;
  float eps;
  const void *embedding, *final_norm;
  const Layer *layers;
  Linear head;
};

namespace {

// Runs f(T) for the element type T.
template <class F>
void with_type(bool is_bf16, F f) {
  if (is_bf16) f(bf16{});
  else f(float{});
}

template <class T>
struct Buffer {  // not initialised, not counted twice
  T *data;
  explicit Buffer(int64_t n)
      : data((T *)std::aligned_alloc(CACHE_LINE, round_up(n * sizeof(T), CACHE_LINE))) {
    if (!data && n) std::abort();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer &) = delete;
};

constexpr int64_t SHARES_PER_LAYER = 8;

// The rows whose hidden states are wanted, as a batch of one row each. Beyond its keys and values,
// the last layer computes no others.
struct Wanted {
  std::vector<Span> spans;
  Batch batch;
  bool all;

  explicit Wanted(const Batch &of) : batch(of), all(of.num_wanted == of.num_tokens) {
    if (all) return;
    for (int64_t s = 0, i = 0; i < of.num_wanted; s++) {
      const Span &span = of.spans[s];
      const int32_t end = span.start + span.length;
      for (; i < of.num_wanted && of.wanted[i] < end; i++)
        spans.push_back({(int32_t)i, 1, span.context - (end - 1 - (int32_t)of.wanted[i]),
                         span.first_page});
    }
    batch.num_tokens = batch.num_spans = of.num_wanted;
    batch.spans = spans.data();
  }

  // Rows of n elements, moved up to stand side by side.
  template <class T>
  void gather(T *rows, int64_t n) const {
    for (int64_t i = 0; i < batch.num_wanted; i++)
      memmove(rows + i * n, rows + batch.wanted[i] * n, n * sizeof(T));
  }
};

// x [num_tokens][hidden]: hidden states before the final norm, those of the wanted rows first.
template <class T>
void forward(const Model &m, const Pool &pool, const Batch &batch, T *x, T *scratch, int threads) {
  const int64_t per_head = m.heads / m.kv_heads;
  const int64_t width = (m.heads + 2 * m.kv_heads) * m.head_dim;
  T *const normed = scratch, *const attended = scratch;  // never needed at once
  T *const qkv = scratch + batch.num_tokens * std::max(m.hidden, m.heads * m.head_dim);
  T *const inner = qkv;  // nor these
  const Pages<T> pages(pool);
  const std::vector<int64_t> slots = slots_of(batch, pool.page_size);
  const Wanted wanted(batch);
  Schedule schedule(batch, m.kv_heads, per_head, threads);
  std::optional<Schedule> narrow_schedule;  // of the last layer
  if (!wanted.all) narrow_schedule.emplace(wanted.batch, m.kv_heads, per_head, threads);
  const int64_t num_slots =
      std::max(schedule.num_slots, narrow_schedule ? narrow_schedule->num_slots : 0);
  Buffer<float> partials(num_slots * Attention<T>::partial_floats(m.head_dim));

  Team::run(threads, 2 + SHARES_PER_LAYER * m.num_layers, [&](Team &team) {
    int64_t rows = batch.num_tokens;
    team.share(rows, team.pieces(rows, 4), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        memcpy(x + r * m.hidden, (const T *)m.embedding + batch.tokens[r] * m.hidden,
               m.hidden * sizeof(T));
    });
    for (int64_t i = 0; i < m.num_layers; i++) {
      const Layer &layer = m.layers[i];
      norm(team, x, (const T *)layer.input_norm, normed, rows, m.hidden, m.eps);
      linear<T, Then::STORE>(team, layer.qkv, normed, rows, qkv);
      rotate_and_store(team, pages, batch, slots.data(), i, m.heads,
                       {layer.query_norm, layer.key_norm, m.eps}, qkv);
      const bool narrow = i == m.num_layers - 1 && !wanted.all;
      if (narrow) {
        rows = batch.num_wanted;
        team.share(1, 1, [&](int64_t, int64_t) {
          wanted.gather(qkv, width);
          wanted.gather(x, m.hidden);
        });
      }
      if (!rows) return;
      Attention<T>{pages,    narrow ? wanted.batch : batch, narrow ? *narrow_schedule : schedule,
                   i,        per_head,                      qkv,
                   width,    attended,                      partials.data}
          .run(team);
      linear<T, Then::ADD>(team, layer.output, attended, rows, x);
      norm(team, x, (const T *)layer.mlp_norm, normed, rows, m.hidden, m.eps);
      linear<T, Then::GATE>(team, layer.gate_up, normed, rows, inner);
      linear<T, Then::ADD>(team, layer.down, inner, rows, x);
    }
  });
}

template <class T>
int64_t scratch_elements(const Model &m, int64_t rows) {
  const int64_t first = std::max(m.hidden, m.heads * m.head_dim);
  const int64_t second =
      std::max((m.heads + 2 * m.kv_heads) * m.head_dim, m.layers[0].gate_up.outputs);
  return rows * (first + second);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// ------------------------------------------------------------------ the step

int64_t evenflow_scratch_bytes(const Model *m, int64_t rows) {
  return m->is_bf16 ? scratch_elements<bf16>(*m, rows) * 2 : scratch_elements<float>(*m, rows) * 4;
}

void evenflow_forward(const Model *m, const Pool *pool, const Batch *batch, void *x, void *scratch,
                      int threads) {
  with_type(m->is_bf16, [&](auto type) {
    using T = decltype(type);
    forward(*m, *pool, *batch, (T *)x, (T *)scratch, threads);
  });
}

// hidden [rows][hidden] -> logits [rows][vocabulary]; normed: room for as much as hidden
void evenflow_logits(const Model *m, const void *hidden, int64_t rows, void *normed, float *logits,
                     int threads) {
  with_type(m->is_bf16, [&](auto type) {
    using T = decltype(type);
    Team::run(threads, 2, [&](Team &team) {
      norm(team, (const T *)hidden, (const T *)m->final_norm, (T *)normed, rows, m->hidden, m->eps);
      linear<T, Then::STORE>(team, m->head, (const T *)normed, rows, logits);
    });
  });
}

// logits [rows][n] -> the column of the largest of each row, the first of equal ones
void evenflow_argmax(const float *logits, int64_t rows, int64_t n, int64_t *best, int threads) {
  Team::run(threads, 1, [&](Team &team) {
    team.share(rows, rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) best[r] = argmax_row(logits + r * n, n);
    });
  });
}

void evenflow_pin_team(const int32_t *processors, int threads) { pin_team(processors, threads); }

// ------------------------------------------------------------------ weights

int64_t evenflow_packed_columns(int64_t outputs, int gated) {
  return num_strips(outputs, gated) * STRIP;
}

// weight [outputs, twice that if gated][inputs]; packed: packed_columns * inputs elements
void evenflow_pack(int is_bf16, const void *weight, const float *bias, int64_t inputs,
                   int64_t outputs, int gated, void *packed, float *packed_bias) {
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    pack((const T *)weight, bias, inputs, outputs, gated, (uint32_t *)packed, packed_bias);
  });
}

// ------------------------------------------------------------------ parts, for tests and measuring

void evenflow_linear(int is_bf16, const Linear *w, const void *x, int64_t rows, void *out,
                     int threads) {
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    Team::run(threads, 1, [&](Team &team) {
      if (w->gated) linear<T, Then::GATE>(team, *w, (const T *)x, rows, (T *)out);
      else linear<T, Then::STORE>(team, *w, (const T *)x, rows, (T *)out);
    });
  });
}

void evenflow_norm(int is_bf16, const void *x, const void *weight, void *out, int64_t rows,
                   int64_t n, float eps, int threads) {
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    Team::run(threads, 1, [&](Team &team) {
      norm(team, (const T *)x, (const T *)weight, (T *)out, rows, n, eps);
    });
  });
}

// qkv [num_tokens][heads + 2 * kv_heads][head_dim]
void evenflow_rotate_and_store(int is_bf16, const Pool *pool, const Batch *batch, int64_t layer,
                               int64_t heads, const HeadNorms *norms, void *qkv, int threads) {
  const std::vector<int64_t> slots = slots_of(*batch, pool->page_size);
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    const Pages<T> pages(*pool);
    Team::run(threads, 1, [&](Team &team) {
      rotate_and_store(team, pages, *batch, slots.data(), layer, heads, *norms, (T *)qkv);
    });
  });
}

// q [num_tokens] rows of q_stride elements -> out [num_tokens][heads * head_dim]
void evenflow_attention(int is_bf16, const Pool *pool, const Batch *batch, int64_t layer,
                        int64_t heads, const void *q, int64_t q_stride, void *out, int threads) {
  const int64_t per_head = heads / pool->heads;
  Schedule schedule(*batch, pool->heads, per_head, threads);
  with_type(is_bf16, [&](auto type) {
    using T = decltype(type);
    Buffer<float> partials(schedule.num_slots * Attention<T>::partial_floats(pool->head_dim));
    Team::run(threads, 1, [&](Team &team) {
      Attention<T>{Pages<T>(*pool), *batch,   schedule,   layer, per_head,
                   (const T *)q,    q_stride, (T *)out, partials.data}
          .run(team);
    });
  });
}

float evenflow_read_all(const void *data, int64_t bytes, int threads) {
  return read_all(threads, data, bytes);
}

int64_t evenflow_multiply(int is_bf16, int64_t rounds, int threads) {
  return is_bf16 ? multiply<bf16>(threads, rounds) : multiply<float>(threads, rounds);
}

}  // extern "C"
