// Threads that compute one step together.
//
// Every thread of a team runs the same code. `share` deals out pieces of work to whoever asks
// first, so that a thread the system has taken away holds up no more than the piece it has; it
// returns when all of them are done. A step has hundreds of such meetings, microseconds apart, and
// OpenMP's barrier sleeps at each of them as soon as the process has more threads than the machine
// has cores; ours keeps looking for a while, and then lets others run between two looks.
#pragma once

#include <omp.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

constexpr int64_t CACHE_LINE = 64;
constexpr int PATIENCE = 4000;  // looks, before a thread sleeps

class Team {
  struct alignas(CACHE_LINE) Counter {
    std::atomic<int64_t> next{0};
    alignas(CACHE_LINE) std::atomic<int> arrived{0};
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
    Counter &counter = *counter_++;
    for (int64_t i; (i = counter.next.fetch_add(1, std::memory_order_relaxed)) < num_pieces;)
      body(n * i / num_pieces, n * (i + 1) / num_pieces);
    meet(counter.arrived);
  }

  // Pieces for even work: some for each thread, none of fewer than `least` items.
  int64_t pieces(int64_t n, int64_t least) const {
    return std::min<int64_t>(6 * size, (n + least - 1) / least);
  }

 private:
  Team(Counter *counters, int size) : size(size), counter_(counters) {}

  // Returns when every thread has come here. The counter is used once.
  void meet(std::atomic<int> &arrived) const {
    int count = arrived.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (count == size) {
      arrived.notify_all();
      return;
    }
    for (int looks = 0; looks < PATIENCE; looks++) {
      if (arrived.load(std::memory_order_acquire) == size) return;
      pause();
    }
    while ((count = arrived.load(std::memory_order_acquire)) < size) arrived.wait(count);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  Counter *counter_;
};

// Gives each thread of the caller's team a processor of its own, from now on. Two threads that wait
// for each other on one processor, while the other one is free, take twice as long; and the system
// is slow to part them, because each of them looks busy.
inline void pin_team(const int32_t *processors, int num_threads) {
#if defined(__linux__)
#pragma omp parallel num_threads(num_threads)
  {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(processors[omp_get_thread_num()], &own);
    sched_setaffinity(0, sizeof own, &own);
  }
#endif
}
