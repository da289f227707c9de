// Threads that compute one step together.
//
// Every thread of a team runs the same code. `share` deals out pieces of work to whoever asks
// first, so that a thread the system has taken away holds up no more than the piece it has; it
// returns when all of them are done.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

constexpr int64_t CACHE_LINE = 64;

class Team {
  struct alignas(CACHE_LINE) Counter {
    std::atomic<int64_t> next{0};
  };

 public:
  // Runs body(team) on every thread; body calls `share` at most max_shares times.
  template <class Body>
  static void run(int num_threads, int64_t max_shares, Body body) {
    std::unique_ptr<Counter[]> counters(new Counter[max_shares]);
#pragma omp parallel num_threads(num_threads)
    {
      Team team(counters.get(), omp_get_num_threads());
      body(team);
    }
  }

  const int size;

  // body(begin, end) for `num_pieces` even pieces of [0, n).
  template <class Body>
  void share(int64_t n, int64_t num_pieces, Body body) {
    std::atomic<int64_t> &next = (counter_++)->next;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < num_pieces;)
      body(n * i / num_pieces, n * (i + 1) / num_pieces);
#pragma omp barrier
  }

  // Pieces for even work: some for each thread, none of fewer than `least` items.
  int64_t pieces(int64_t n, int64_t least) const {
    return std::min<int64_t>(6 * size, (n + least - 1) / least);
  }

 private:
  Team(Counter *counters, int size) : size(size), counter_(counters) {}

  Counter *counter_;
};
