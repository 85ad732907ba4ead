// Runs collectives on threads of its own, in order, and gives up on those that take too long.
//
// oneCCL waits for ever and cannot be interrupted, so nobody waits in it: one thread at a time, the
// leader, starts operations and asks each whether it is over. Another thread watches how long they
// take, and whether the processes of the other ranks live. What it gives up on is never freed:
// oneCCL may still write there, and would wait for it.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <oneapi/ccl.hpp>

#include "job.h"
#include "peers.h"

namespace lightning_perf {

class Engine {
 public:
  // Never freed: a thread may be stuck in oneCCL.
  static Engine& get() {
    static Engine* engine = new Engine();
    TORCH_CHECK(engine->pid_ == getpid(),
                "The backend ccl was asked for in a process that was forked from one that uses it. "
                "Start processes before the first process group, or by 'spawn' or 'popen'.");
    return *engine;
  }

  void add(const GroupPtr& group) {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_.push_back(group);
  }

  void submit(const JobPtr& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    Group& group = *job->group;
    TORCH_CHECK_WITH(DistBackendError, !group.closed, "ccl: The process group is closed.");
    TORCH_CHECK_WITH(DistBackendError, group.broken.empty(), group.broken);
    if (job->peer >= 0) {
      group.has_transferred = true;
      // One after the other: oneCCL may start them in another order than it was asked to.
      const bool waits = next_transfer(group, *job) != nullptr;
      group.transfers.push_back(job);
      if (!waits) turn(job);
    } else {
      group.queue.push_back(job);
      if (group.queue.size() == 1) turn(job);
    }
    changed_.notify_one();
    submitted_.notify_one();
  }

  // Runs a function while no other thread is in oneCCL, and waits for it. It must hold what it
  // uses: it goes on alone when the time is over.
  void call(std::function<void()> function, const std::string& what, milliseconds timeout,
            const std::vector<Peer>& peers) {
    struct State {
      bool over = false;
      std::string error;
    };
    auto state = std::make_shared<State>();
    std::unique_lock<std::mutex> lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, stuck_.empty(), stuck_);
    calls_.push_back([this, state, function = std::move(function)] {
      std::string error;
      try {
        function();
      } catch (const std::exception& raised) {
        error = raised.what();
      }
      std::lock_guard<std::mutex> over(mutex_);
      state->error = error;
      state->over = true;
      settled_.notify_all();
    });
    changed_.notify_one();
    const auto since = Clock::now();
    std::optional<Clock::time_point> ended;
    while (!settled_.wait_for(lock, kTick, [&] { return state->over; }) && stuck_.empty()) {
      const Peer* gone = ended_for_long(peers, ended);
      if (gone) stuck_ = has_exited(*gone, what);
      if (Clock::now() - since > timeout) stuck_ = timed_out(timeout, what);
      if (!stuck_.empty()) {
        for (const auto& group : std::vector<GroupPtr>(groups_)) give_up(lock, group, stuck_);
        leave_abruptly();
      }
    }
    TORCH_CHECK_WITH(DistBackendError, state->over, stuck_);
    TORCH_CHECK_WITH(DistBackendError, state->error.empty(), "ccl: ", what, ": ", state->error);
  }

  // Waits for what was submitted, which ends by its time-out if not before. The communicator stays
  // until the process ends: to free it, oneCCL asks a process of the group which may have ended
  // already, and then aborts this one.
  void close(const GroupPtr& group, std::optional<milliseconds> limit = std::nullopt) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_idle = [&] { return group->is_idle(); };
    if (!limit) {
      settled_.wait(lock, is_idle);
    } else if (!settled_.wait_for(lock, *limit, is_idle)) {
      give_up(lock, group, "ccl: The process ended before its collectives did.");
    }
    if (std::exchange(group->closed, true)) return;
    groups_.erase(std::remove(groups_.begin(), groups_.end(), group), groups_.end());
    closed_.push_back(group);
  }

  // Closed groups whose communicators can serve again. A message that was sent and not received
  // would arrive in the next group.
  std::vector<GroupPtr> idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<GroupPtr> found;
    for (const auto& group : closed_) {
      const bool clean = group->broken.empty() && !group->has_transferred;
      if (clean && group->communicator) found.push_back(group);
    }
    return found;
  }

  // At the end of the process.
  void close_all(milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!groups_.empty()) {
      const GroupPtr group = groups_.back();
      lock.unlock();
      close(group, limit);
      lock.lock();
    }
    settled_.wait_for(lock, limit, [&] { return completing_ == 0; });
  }

 private:
  // One thread leads; the others are there for works whose callbacks wait for another collective,
  // as those of PyTorch's PowerSGD do.
  static constexpr int kThreads = 4;
  static constexpr milliseconds kTick{100}, kLook{1000};
  // What a process sent before it ended may still be on its way.
  static constexpr milliseconds kOnItsWay{2000};

  Engine() : pid_(getpid()) {
    for (int thread = 0; thread < kThreads; ++thread) std::thread([this] { serve(); }).detach();
    std::thread([this] { watch(); }).detach();
  }

  void serve() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // so that a short sleep of this thread is one
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return !led_ && has_work(); });
      led_ = true;
      auto over = lead(lock);
      led_ = false;
      if (has_work()) changed_.notify_one();
      const size_t completing = over.size();
      completing_ += completing;
      lock.unlock();
      for (const auto& job : over) complete(*job);
      // Tensors may belong to Python, whose lock is never waited for with that of the engine.
      over.clear();
      lock.lock();
      completing_ -= completing;
      settled_.notify_all();
    }
  }

  bool has_work() const { return !calls_.empty() || !ready_.empty() || !flying_.empty(); }

  // Returns jobs as soon as some are over, with those that follow them started.
  std::vector<JobPtr> lead(std::unique_lock<std::mutex>& lock) {
    Backoff backoff;
    for (;;) {
      while (!calls_.empty()) {
        const auto call = std::move(calls_.front());
        calls_.pop_front();
        lock.unlock();
        call();
        lock.lock();
      }
      start_ready(lock);
      if (!has_work()) return {};
      lock.unlock();
      const auto before = Clock::now();
      const auto over = poll();
      if (over.empty()) backoff.pause(before);
      lock.lock();
      if (over.empty()) continue;
      std::vector<JobPtr> complete;
      for (const auto& job : over) {
        if (job->given_up) continue;  // its work has failed already
        retire(lock, job);
        complete.push_back(job);
      }
      start_ready(lock);
      return complete;
    }
  }

  void start_ready(std::unique_lock<std::mutex>& lock) {
    while (!ready_.empty()) {
      const auto starting = std::exchange(ready_, {});
      lock.unlock();
      for (const auto& job : starting) {
        if (job->given_up) continue;
        try {
          job->start(job->events, *job->group->communicator);
        } catch (const std::exception& raised) {
          job->error = raised.what();
        }
        flying_.push_back(job);
      }
      lock.lock();
    }
  }

  std::vector<JobPtr> poll() {
    std::vector<JobPtr> over;
    for (auto next = flying_.begin(); next != flying_.end();) {
      const bool is_over = (*next)->given_up || ask(**next);
      if (is_over) over.push_back(*next);
      next = is_over ? flying_.erase(next) : std::next(next);
    }
    return over;
  }

  static bool ask(Job& job) {
    try {
      while (job.error.empty() && !job.events.empty() && job.events.back().test()) {
        job.events.pop_back();
      }
    } catch (const std::exception& raised) {
      job.error = raised.what();
    }
    return !job.error.empty() || job.events.empty();
  }

  // Lets the next collective of the group have its turn.
  void retire(std::unique_lock<std::mutex>& lock, const JobPtr& job) {
    Group& group = *job->group;
    if (job->peer >= 0) {
      group.transfers.remove(job);
      if (const JobPtr next = next_transfer(group, *job)) turn(next);
    } else {
      group.queue.pop_front();
      if (!group.queue.empty()) turn(group.queue.front());
    }
    if (!job->events.empty()) {  // it failed half way
      abandoned_.push_back(job);
      give_up(lock, job->group, "ccl: " + job->what + " failed: " + job->error);
    }
  }

  static JobPtr next_transfer(const Group& group, const Job& job) {
    const auto next = std::find_if(group.transfers.begin(), group.transfers.end(),
                                   [&](const JobPtr& other) { return other->same_way(job); });
    return next == group.transfers.end() ? nullptr : *next;
  }

  void turn(const JobPtr& job) {
    job->since = Clock::now();
    ready_.push_back(job);
  }

  static void complete(Job& job) {
    try {
      at::AutoDispatchBelowADInplaceOrView raw;  // as inside any collective of PyTorch
      TORCH_CHECK_WITH(DistBackendError, job.error.empty(), "ccl: ", job.what, " failed: ",
                       job.error);
      if (job.after) job.after();
    } catch (...) {
      job.work->fail(std::current_exception());
      return;
    }
    job.work->succeed();
  }

  void watch() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto is_busy = [](const GroupPtr& group) { return !group->is_idle(); };
    for (;;) {
      submitted_.wait(lock, [&] { return std::any_of(groups_.begin(), groups_.end(), is_busy); });
      lock.unlock();
      std::this_thread::sleep_for(kTick);
      lock.lock();
      for (const auto& group : std::vector<GroupPtr>(groups_)) {
        const std::string reason = hopeless(*group);
        if (!reason.empty()) give_up(lock, group, reason);
      }
    }
  }

  // Returns why to wait no longer for what has its turn, or nothing.
  std::string hopeless(Group& group) {
    std::vector<JobPtr> jobs(group.transfers.begin(), group.transfers.end());
    if (!group.queue.empty()) jobs.push_back(group.queue.front());
    const auto now = Clock::now();
    const Job* slow = nullptr;
    for (const auto& job : jobs) {
      if (!job->since) continue;
      if (now - *job->since >= job->timeout) return timed_out(job->timeout, job->what);
      if (now - *job->since > kLook) slow = job.get();
    }
    if (!slow) {
      group.ended.reset();
    } else if (now - group.looked > kLook) {
      group.looked = now;
      std::vector<Peer> needed;
      for (const Peer& peer : group.peers) {
        // Only a collective needs all ranks.
        if (slow->peer < 0 || slow->peer == peer.in_group) needed.push_back(peer);
      }
      if (const Peer* gone = ended_for_long(needed, group.ended)) {
        return has_exited(*gone, slow->what);
      }
    }
    return "";
  }

  static const Peer* ended_for_long(const std::vector<Peer>& peers,
                                    std::optional<Clock::time_point>& since) {
    const auto gone = std::find_if(peers.begin(), peers.end(), has_ended);
    if (gone == peers.end()) {
      since.reset();
    } else if (!since) {
      since = Clock::now();
    } else if (Clock::now() - *since >= kOnItsWay) {
      return &*gone;
    }
    return nullptr;
  }

  static std::string timed_out(milliseconds timeout, const std::string& what) {
    return "ccl: Timed out waiting " + std::to_string(timeout.count()) + " ms for " + what +
           ". Another rank is stuck, has not called it, or needs longer: see its output.";
  }

  static std::string has_exited(const Peer& peer, const std::string& what) {
    return "ccl: remote process exited: rank " + std::to_string(peer.rank) + " (process " +
           std::to_string(peer.pid) + ") ended before " + what + " was complete.";
  }

  // Fails all works of a group, and those to come.
  void give_up(std::unique_lock<std::mutex>& lock, const GroupPtr& group,
               const std::string& reason) {
    if (!group->broken.empty()) return;
    group->broken = reason;
    std::vector<JobPtr> jobs(group->queue.begin(), group->queue.end());
    jobs.insert(jobs.end(), group->transfers.begin(), group->transfers.end());
    group->queue.clear();
    group->transfers.clear();
    for (const auto& job : jobs) job->given_up = true;
    abandoned_.insert(abandoned_.end(), jobs.begin(), jobs.end());
    leave_abruptly();
    settled_.notify_all();
    lock.unlock();
    for (const auto& job : jobs) {
      job->work->fail(std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, __LINE__}, reason)));
    }
    lock.lock();
  }

  // At its end the process would wait in oneCCL for what was given up.
  void leave_abruptly() {
    if (std::exchange(leaves_abruptly_, true)) return;
    const auto leave = [](int status, void*) {
      fflush(nullptr);
      _exit(status);
    };
    on_exit(leave, nullptr);
  }

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable changed_, submitted_, settled_;
  std::vector<GroupPtr> groups_, closed_;
  std::deque<std::function<void()>> calls_;
  std::vector<JobPtr> ready_, abandoned_;
  std::list<JobPtr> flying_;  // of the leader alone, but for asking whether there are any
  size_t completing_ = 0;
  bool led_ = false, leaves_abruptly_ = false;
  std::string stuck_;  // why no thread can enter oneCCL any more
};

}  // namespace lightning_perf
