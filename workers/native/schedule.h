// Which thread attends to what: a step's work in pieces, the same for all layers.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "pages.h"
#include "vec.h"

constexpr int SEGMENT = 256;    // keys; results of segments are merged in order
constexpr int FEW_ROWS = 8;     // up to these, values are read once, from their pages
constexpr int GOOD_ROWS = 96;   // of an item, if there are that many
constexpr int MAX_ROWS = 128;   // of an item, hence also query heads per kv head

// Some tokens of a span, the query heads of some kv heads, some segments of the keys.
struct Item {
  int32_t span, first_head, num_heads, first_token, num_tokens;
  int32_t begin, end;  // keys
  int32_t group;       // of the items whose results are merged into one; -1: the result is whole
  int32_t first_slot;  // of its rows among partial results
};

struct Group {
  int32_t first_slot, rows, size;
  std::atomic<int32_t> missing;
};

class Schedule {
 public:
  std::vector<Item> items;  // the costly ones first
  std::unique_ptr<Group[]> groups;
  int64_t num_slots = 0;

  Schedule(const Batch &batch, int64_t kv_heads, int64_t per_head, int threads)
      : batch_(batch), kv_heads_(kv_heads), per_head_(per_head) {
    const int64_t block = std::max<int64_t>(1, GOOD_ROWS / per_head);
    int64_t num_blocks = 0, num_segments = 0;
    for (int64_t s = 0; s < batch.num_spans; s++) {
      num_blocks += (batch.spans[s].length + block - 1) / block;
      num_segments += (batch.spans[s].context + SEGMENT - 1) / SEGMENT;
    }
    const bool too_few = num_blocks * kv_heads < 2 * threads;
    const bool many = num_segments >= 3 * threads;
    for (int64_t s = 0; s < batch.num_spans; s++)
      for (int64_t t = 0; t < batch.spans[s].length; t += block)
        add(s, t, std::min(block, batch.spans[s].length - t), too_few, many);
    make_groups();
    auto cost = [&](const Item &i) {
      return (i.end - i.begin) * i.num_heads * (i.num_tokens * per_head_ + 8);
    };
    std::stable_sort(items.begin(), items.end(),
                     [&](const Item &a, const Item &b) { return cost(a) > cost(b); });
  }

 private:
  const Batch &batch_;
  const int64_t kv_heads_, per_head_;
  int32_t num_groups_ = 0;

  // One block of tokens, for every head; `split` deals its segments out. Where few rows read many
  // keys, reading takes the time: heads whose keys lie side by side then stay `together`.
  void add(int64_t span, int64_t token, int64_t num_tokens, bool split, bool together) {
    const int64_t rows = num_tokens * per_head_;
    const bool few = rows <= FEW_ROWS;
    const int64_t num_heads = few && together ? std::min(kv_heads_, MAX_ROWS / rows) : 1;
    const Span &of = batch_.spans[span];
    const int64_t keys = of.context - of.length + token + num_tokens;
    split = keys > SEGMENT && (split || few);
    for (int64_t h = 0; h < kv_heads_; h += num_heads) {
      const int64_t heads = std::min(num_heads, kv_heads_ - h);
      for (int64_t begin = 0; begin < keys; begin += split ? SEGMENT : keys) {
        const int64_t end = split ? std::min(keys, begin + SEGMENT) : keys;
        items.push_back({(int32_t)span, (int32_t)h, (int32_t)heads, (int32_t)token,
                         (int32_t)num_tokens, (int32_t)begin, (int32_t)end,
                         split ? num_groups_ : -1, (int32_t)num_slots});
        if (split) num_slots += heads * rows;
      }
      num_groups_ += split;
    }
  }

  void make_groups() {
    groups.reset(new Group[num_groups_]());
    for (const Item &item : items) {
      if (item.group < 0) continue;
      Group &group = groups[item.group];
      if (!group.size++) group.first_slot = item.first_slot;
      group.rows = (int32_t)(item.num_heads * item.num_tokens * per_head_);
      group.missing = group.size;
    }
  }
};
