// The handle of a torch call, and its errors in Python.
//
// The calls of a Job complete on the group's worker or on the caller's thread. The last one copies
// the results back and completes the Work and its future, if there is one. A device call completes
// here when it is enqueued; c10d_devices.h handles the rest.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c10d_devices.h"
#include "bindings/c10d_tensors.h"

namespace pycomm::bindings {

using std::chrono::milliseconds;

// The Python exception for an error of pycomm, made by translate() of errors.h. torch's
// python_error keeps its class through autograd's threads and can be raised more than once, unlike
// types that torch does not know.
inline python_error as_python(const std::exception_ptr& ours) {
  py::gil_scoped_acquire gil;
  try {
    std::rethrow_exception(ours);
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  python_error result;
  result.persist();
  return result;
}

// Runs `body` and converts pycomm's errors to Python exceptions.
template <typename Body>
auto with_python_errors(const Body& body) {
  try {
    return body();
  } catch (const Error&) {
    throw as_python(std::current_exception());
  }
}

// By kind, because exception classes of another module cannot be compared.
inline c10d::ErrorType error_type_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::timeout:
      return c10d::ErrorType::TIMEOUT;
    case ErrorKind::peer_lost:
      return c10d::ErrorType::REMOTE_ERROR;
    case ErrorKind::group_broken:
    case ErrorKind::internal:
      return c10d::ErrorType::COMM_ERROR;
    case ErrorKind::invalid_argument:
    case ErrorKind::unsupported:
    case ErrorKind::mismatch:
      break;  // a usage error: the group is intact
  }
  return c10d::ErrorType::SUCCESS;
}

// The first error that broke a group, and the functions to call then. Any thread may call.
class BreakingError {
 public:
  // What get_error() returns. `device_group_broken`: calls on devices may break their group later
  // than they return.
  c10d::ErrorType type(bool device_group_broken) const {
    const c10d::ErrorType known = type_;
    if (known != c10d::ErrorType::SUCCESS || !device_group_broken) return known;
    return c10d::ErrorType::COMM_ERROR;
  }

  // Keeps the type of a first error, and then calls the hooks. Ignores a usage error, and null.
  void record(const std::exception_ptr& thrown) {
    auto expected = c10d::ErrorType::SUCCESS;
    const c10d::ErrorType type = type_of(thrown);
    if (type == expected || !type_.compare_exchange_strong(expected, type)) return;
    for (const auto& [id, hook] : hooks()) {
      try {
        hook();
      } catch (const std::exception& error) {
        TORCH_WARN("pycomm: abort hook ", id, " failed: ", error.what());
      }
    }
  }
  // For the next group.
  void reset() { type_ = c10d::ErrorType::SUCCESS; }

  // Replaces the hook with this number.
  void set_hook(int64_t id, std::function<void()> hook) {
    const std::lock_guard lock(mutex_);
    hooks_[id].swap(hook);
  }
  void remove_hook(int64_t id) {
    std::map<int64_t, std::function<void()>>::node_type removed;  // destroyed unlocked
    const std::lock_guard lock(mutex_);
    removed = hooks_.extract(id);
  }

 private:
  static c10d::ErrorType type_of(const std::exception_ptr& thrown) {
    if (!thrown) return c10d::ErrorType::SUCCESS;
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      return error_type_of(error.kind());
    } catch (...) {  // from torch, while copying: the group is intact
    }
    return c10d::ErrorType::SUCCESS;
  }
  std::map<int64_t, std::function<void()>> hooks() const {
    const std::lock_guard lock(mutex_);
    return hooks_;
  }

  std::atomic<c10d::ErrorType> type_{c10d::ErrorType::SUCCESS};
  mutable std::mutex mutex_;
  std::map<int64_t, std::function<void()>> hooks_;
};

// Ctrl-C must end a wait. Only the main thread receives it, and only with the GIL.
inline void raise_pending_signal() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error error;
  error.persist();
  throw python_error(error);
}

// Whether the call is complete on the device, or failed, within the limit.
inline bool wait_for_device(const DeviceCompletion& call, milliseconds limit,
                            std::chrono::steady_clock::time_point start) {
  constexpr milliseconds kPollInterval{1};  // devices send no notification
  while (!call.error() && !call.passed()) {
    std::this_thread::sleep_for(kPollInterval);
    raise_pending_signal();
    if (std::chrono::steady_clock::now() - start >= limit) return false;
  }
  return true;
}

class EngineWork : public c10d::Work {
 public:
  // `title`: for the profiler. `completion`: for a job on a device, otherwise null.
  EngineWork(int rank, uint64_t sequence, Job job, const std::string& title,
             std::shared_ptr<DeviceCompletion> completion)
      : c10d::Work(rank, job.type, title.c_str(), job.inputs),
        sequence_(sequence),
        job_(std::move(job)),
        completion_(std::move(completion)),
        left_(job_.calls.size()) {
    if (completion_) {  // made now: its events are recorded when the job ends
      completion_->hold(job_);
      future_ =
          c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                   std::vector{completion_->stream().device()});
    }
    if (job_.calls.empty()) complete_calls(1, nullptr);
  }

  const Job& job() const { return job_; }

  // The job's last receive in host memory. It may begin with the first use of this Work.
  void set_receive(std::shared_ptr<group::Work> receive) { receive_ = std::move(receive); }

  // Makes the calls that depend on the first one's result. Returns their error.
  std::exception_ptr follow(group::Collectives& group) noexcept {
    try {
      if (job_.after) job_.after(group, job_.calls.front().timeout);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  // Marks `count` calls as complete. The first error is kept; the last call completes the work.
  void complete_calls(size_t count, const std::exception_ptr& error) noexcept {
    if (error && !failed_.exchange(true)) error_ = error;
    if (left_.fetch_sub(count) > count) return;
    try {
      c10::OptionalStreamGuard on;
      if (completion_) on.reset_stream(completion_->stream());
      if (!failed_) copy_back(job_);
      if (completion_) completion_->record();
    } catch (...) {
      error_ = std::current_exception();
    }
    job_.held.clear();
    job_.copies.clear();
    job_.after = {};
    finish(error_);
    over_.store(true, std::memory_order_release);
    complete_future();
  }

  static void copy_back(Job& job) {
    BelowAutograd guard;
    for (auto& [to, from] : job.copies)
      if (!to.is_same(from)) to.copy_(from.view(to.sizes()));
  }

  // On a device: whether it has completed the call.
  bool isCompleted() override {
    start_receive();
    if (!c10d::Work::isCompleted()) return false;
    return !completion_ || !isSuccess() || completion_->passed();
  }
  bool isSuccess() const override {
    start_receive();
    return c10d::Work::isSuccess() && !late_error();
  }
  std::exception_ptr exception() const override {
    start_receive();
    std::exception_ptr error = late_error();
    {
      const std::lock_guard lock(mutex_);
      if (exception_) error = exception_;
    }
    return error ? std::make_exception_ptr(as_python(error)) : nullptr;
  }

  // On a device these make the current stream wait for the call. A thread waits for the device only
  // in a wait() with a limit.
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

  // A limit of 0 waits as long as the call may take. A wait that times out leaves the call running.
  bool wait(milliseconds limit) override {
    const auto start = std::chrono::steady_clock::now();
    if (limit > kNoTimeout)
      start_receive();
    else if (receive_)
      receive_->advance();
    for (int i = 0; i < kSpins && !over_.load(std::memory_order_acquire); ++i)
      std::this_thread::yield();
    std::unique_lock lock(mutex_);
    while (!completed_) {
      const milliseconds spent =
          std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
      if (limit > kNoTimeout && spent >= limit)
        throw as_python(std::make_exception_ptr(timed_out(limit)));
      cv_.wait_for(lock,
                   limit > kNoTimeout ? std::min(kSignalInterval, limit - spent) : kSignalInterval,
                   [this] { return completed_; });
      if (completed_) break;
      lock.unlock();
      raise_pending_signal();
      lock.lock();
    }
    if (exception_) throw as_python(exception_);
    lock.unlock();
    if (completion_) join(limit, start);
    return true;
  }

  std::vector<at::Tensor> result() override { return job_.outputs; }
  int sourceRank() const override {
    if (job_.type == c10d::OpType::RECV) return job_.calls.front().peer;
    return job_.source ? *job_.source : c10d::Work::sourceRank();
  }
  uint64_t getSequencenumber() const override { return sequence_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    start_receive();
    {
      std::lock_guard lock(mutex_);
      if (!future_)
        future_ =
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    complete_future();
    return future_;
  }

 private:
  static constexpr int kSpins = 20;  // about 10 us of yields, enough for most small calls
  static constexpr milliseconds kSignalInterval{100};

  // Leaves a deferred receive to the worker.
  void start_receive() const {
    if (receive_) (void)receive_->done();
  }

  std::exception_ptr late_error() const { return completion_ ? completion_->error() : nullptr; }

  void join(milliseconds limit, std::chrono::steady_clock::time_point start) {
    if (const auto error = late_error()) throw as_python(error);
    completion_->join();
    if (limit <= kNoTimeout) return;
    const bool over = wait_for_device(*completion_, limit, start);
    if (const auto error = late_error()) throw as_python(error);
    if (!over) throw as_python(std::make_exception_ptr(timed_out(limit)));
  }

  Timeout timed_out(milliseconds limit) const {
    ErrorFields fields{
        .op = job_.verb(), .sequence = static_cast<int64_t>(sequence_), .rank = rank_};
    fields.elapsed_s = std::chrono::duration<double>(limit).count();
    return Timeout("pycomm " + fields.op + ": wait() reached its timeout of " +
                       std::to_string(limit.count()) + " ms; the call itself continues",
                   fields);
  }

  // Completes the future once both the future and the result exist. The thread that adds the second
  // one calls this.
  void complete_future() {
    {
      std::lock_guard lock(mutex_);
      if (!future_ || !completed_ || std::exchange(future_completed_, true)) return;
    }
    if (exception_) {
      future_->setErrorIfNeeded(std::make_exception_ptr(as_python(exception_)));
      return;
    }
    try {
      c10::OptionalStreamGuard on;  // callbacks of the future wait for this stream
      if (completion_) on.reset_stream(completion_->stream());
      future_->markCompleted(c10::IValue(job_.outputs));
    } catch (...) {  // the device failed
      future_->setErrorIfNeeded(std::current_exception());
    }
  }

  const uint64_t sequence_;
  Job job_;
  const std::shared_ptr<DeviceCompletion> completion_;
  std::shared_ptr<group::Work> receive_;
  std::atomic<size_t> left_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  std::atomic<bool> over_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool future_completed_ = false;
};

// Starts the messages of a job, of one device, as one call. `error`: of the backend.
inline std::shared_ptr<group::Work> start_messages(group::Collectives& group,
                                                   const c10::intrusive_ptr<EngineWork>& work,
                                                   const std::shared_ptr<BreakingError>& error) {
  const auto completed = [work, error](std::exception_ptr thrown) {
    error->record(thrown);
    work->complete_calls(work->job().calls.size(), thrown);
  };
  return group.start_messages(work->job().calls, completed);
}

}  // namespace pycomm::bindings
