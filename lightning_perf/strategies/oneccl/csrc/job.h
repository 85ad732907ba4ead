// What the engine runs, for whom, and how it waits for it.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <oneapi/ccl.hpp>

#include "peers.h"
#include "work.h"

namespace lightning_perf {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

struct Group;
using GroupPtr = std::shared_ptr<Group>;

// A collective, or a send or receive, of which oneCCL may make several operations.
struct Job {
  GroupPtr group;
  c10::intrusive_ptr<Work> work;
  std::string what;
  milliseconds timeout;
  int peer = -1;  // the other rank of a send or receive, which are in no order with collectives
  bool sends = false;
  std::function<void(std::vector<ccl::event>&, const ccl::communicator&)> start;
  std::function<void()> after;  // puts results where they belong, if they are not there already

  std::optional<Clock::time_point> since;  // when it became its turn
  std::atomic<bool> given_up{false};
  // Of the leader alone.
  std::vector<ccl::event> events;
  std::string error;

  bool same_way(const Job& other) const { return peer == other.peer && sends == other.sends; }
};
using JobPtr = std::shared_ptr<Job>;

struct Group {
  int rank, size;
  std::string name;  // the rank and the group, to be read
  std::vector<Peer> peers;
  const pid_t pid = getpid();
  std::atomic<int64_t> timeout_ms;
  std::string address;  // of the store by which its processes found each other
  std::optional<ccl::communicator> communicator;

  // Guarded by the mutex of the engine.
  std::deque<JobPtr> queue;  // collectives; the first one is running
  std::list<JobPtr> transfers;  // the first one to each rank, and from each, is running
  std::string broken;  // why it takes nothing any more
  bool closed = false;
  bool has_transferred = false;
  Clock::time_point looked;  // at the other processes
  std::optional<Clock::time_point> ended;

  bool is_idle() const { return queue.empty() && transfers.empty(); }
};

// How a leader waits that found nothing: politely, since ranks may share a core; and asleep after a
// while, since cores are there to compute. Where others take the core, that while is over at once,
// and who sleeps is woken sooner than who only wants to go on.
class Backoff {
 public:
  void pause(Clock::time_point before) {
    const auto now = Clock::now();
    // oneCCL copies and reduces while it is asked. That takes longer than to find nothing.
    if (now - before > kWorked) worked_ = now;
    if (now - worked_ < kAwake) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kAsleep);
    }
  }

 private:
  static constexpr std::chrono::microseconds kWorked{5}, kAwake{200}, kAsleep{20};
  Clock::time_point worked_ = Clock::now();
};

}  // namespace lightning_perf
