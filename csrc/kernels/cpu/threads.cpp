// One job at a time: threads take its tasks from a counter. The job number is the signal; a thread
// that wakes late finds the counter at its end and takes no task.
#include "kernels/cpu/threads.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <vector>

#include "core/cpu_relax.h"
#include "kernels/device_kernels.h"
#include "os/thread.h"

namespace pycomm::kernels {
namespace {

int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

std::atomic<int>& wanted() {
  static std::atomic<int> threads{processors()};
  return threads;
}

// Spin time before a thread sleeps: a kernel has several jobs in close succession, and a wake-up
// takes longer than this on a virtual machine.
constexpr std::chrono::microseconds kSpinTime{50};

template <typename F>
void spin_until(F&& holds) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  while (!holds() && std::chrono::steady_clock::now() < end) cpu_relax();
}

class ThreadPool {
 public:
  // False, without any effect, if another caller uses the pool.
  bool work(size_t tasks, const std::function<void(size_t)>& task, int threads) {
    const std::unique_lock mine(busy_, std::try_to_lock);
    if (!mine) return false;
    {
      const std::lock_guard lock(mutex_);
      while (threads_ < threads - 1) add_thread();
      task_ = &task;
      tasks_ = tasks;
      open_places_ = threads - 1;
      next_.store(0, std::memory_order_relaxed);
      ++job_;
    }
    wake_.notify_all();
    take(task, tasks);
    {
      const std::lock_guard lock(mutex_);
      task_ = nullptr;  // late threads take no task
    }
    spin_until([this] { return working_.load(std::memory_order_relaxed) == 0; });
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return working_ == 0; });
    return true;
  }

 private:
  void add_thread() {
    os::start_thread("pycomm-kernel", [this, seen = job_.load()]() mutable {
      for (;;) run_next_job(seen);
    }).detach();
    ++threads_;
  }

  // Waits for a job after `seen`, and runs its tasks if a place is left.
  void run_next_job(uint64_t& seen) {
    spin_until([&] { return job_.load(std::memory_order_relaxed) != seen; });
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [&] { return job_ != seen; });
    seen = job_;
    if (task_ == nullptr || open_places_ == 0) return;
    --open_places_;
    ++working_;
    const auto& task = *task_;
    const size_t tasks = tasks_;
    lock.unlock();
    take(task, tasks);
    lock.lock();
    if (--working_ == 0) done_.notify_one();
  }

  void take(const std::function<void(size_t)>& task, size_t tasks) {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks;) task(i);
  }

  std::mutex busy_;
  std::mutex mutex_;  // guards writes of the members below, except next_
  std::condition_variable wake_, done_;
  const std::function<void(size_t)>* task_ = nullptr;
  size_t tasks_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> job_{0};
  std::atomic<int> working_{0};
  int threads_ = 0, open_places_ = 0;
};

// The thread pool of this process. It is never destroyed, because its threads wait in it until the
// process ends.
ThreadPool& thread_pool() {
  static std::atomic<ThreadPool*> current{new ThreadPool};
  static const int registered = pthread_atfork(nullptr, nullptr, [] {
    current.store(new ThreadPool, std::memory_order_relaxed);  // a child lacks the threads
  });
  static_cast<void>(registered);
  return *current.load(std::memory_order_relaxed);
}

}  // namespace

void parallel(size_t tasks, const std::function<void(size_t)>& task) {
  const int threads = static_cast<int>(
      std::min<size_t>(tasks, static_cast<size_t>(wanted().load(std::memory_order_relaxed))));
  if (threads > 1 && thread_pool().work(tasks, task, threads)) return;
  for (size_t i = 0; i < tasks; ++i) task(i);
}

void set_kernel_threads(int threads) {
  wanted().store(std::max(1, threads), std::memory_order_relaxed);
}
int kernel_threads() { return wanted().load(std::memory_order_relaxed); }

void parallel_or_throw(size_t tasks, const std::function<void(size_t)>& task) {
  std::vector<std::exception_ptr> errors(tasks);
  parallel(tasks, [&](size_t i) {
    try {
      task(i);
    } catch (...) {  // tasks must not throw
      errors[i] = std::current_exception();
    }
  });
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace pycomm::kernels
