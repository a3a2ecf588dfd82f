// The handle of a call made through torch, and the errors that it raises in Python.
//
// A Job's calls end on the engine's worker (or on the caller's thread); the last one to end copies
// the results back, finishes the Work and its future, if anybody asked for one. On a device a call
// ends here when it is enqueued, and c10d_devices.h has the rest. Included by c10d_backend.h only.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "bindings/c10d_devices.h"
#include "bindings/c10d_tensors.h"

namespace pycomm::bindings {

using std::chrono::milliseconds;

// The Python exception for an error of ours, made by the translator of the module that made the
// group. torch's python_error, unlike a type that torch does not know, keeps its class through
// autograd's threads, and can be raised more than once.
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

// Runs `body`; an error of ours leaves as a Python exception.
template <typename Body>
auto with_python_errors(const Body& body) {
  try {
    return body();
  } catch (const Error&) {
    throw as_python(std::current_exception());
  }
}

// Ctrl-C must end a wait; only the main thread hears it, and only with the interpreter's lock.
inline void raise_pending_signal() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return;
  python_error error;
  error.persist();
  throw python_error(error);
}

class EngineWork : public c10d::Work {
 public:
  // `landing`: of a job on a device, else null.
  EngineWork(int rank, uint64_t sequence, Job job, std::shared_ptr<Landing> landing)
      : c10d::Work(rank, job.type, job.title, job.inputs),
        sequence_(sequence),
        job_(std::move(job)),
        landing_(std::move(landing)),
        left_(job_.calls.size()) {
    if (landing_) {  // its events are recorded as the job ends, so it cannot be made later
      landing_->hold(job_);
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::vector{landing_->stream().device()});
    }
    if (job_.calls.empty()) land(1, nullptr);
  }

  const Job& job() const { return job_; }

  // Makes the calls that depend on the first one's result; gives their error.
  std::exception_ptr follow(Group& group) noexcept {
    try {
      if (job_.after) job_.after(group, job_.calls.front().timeout);
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  // `count` of the calls are over. The first error wins; the last call finishes the work.
  void land(size_t count, const std::exception_ptr& error) noexcept {
    if (error && !failed_.exchange(true)) error_ = error;
    if (left_.fetch_sub(count) > count) return;
    try {
      c10::OptionalStreamGuard on;
      if (landing_) on.reset_stream(landing_->stream());
      if (!failed_) copy_back(job_);
      if (landing_) landing_->land();
    } catch (...) {
      error_ = std::current_exception();
    }
    job_.held.clear();
    job_.copies.clear();
    job_.after = {};
    finish(error_);
    over_.store(true, std::memory_order_release);
    settle();
  }

  static void copy_back(Job& job) {
    BelowAutograd guard;
    for (auto& [to, from] : job.copies)
      if (!to.is_same(from)) to.copy_(from.view(to.sizes()));
  }

  // On a device: whether it has passed the call.
  bool isCompleted() override {
    if (!c10d::Work::isCompleted()) return false;
    return !landing_ || !isSuccess() || landing_->passed();
  }
  bool isSuccess() const override { return c10d::Work::isSuccess() && !late_error(); }
  std::exception_ptr exception() const override {
    std::exception_ptr error = late_error();
    {
      const std::lock_guard lock(mutex_);
      if (exception_) error = exception_;
    }
    return error ? std::make_exception_ptr(as_python(error)) : nullptr;
  }

  // On a device these order the current stream behind the call. No thread waits for the device, but
  // in a wait() with a limit.
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

  // 0 waits for as long as the call may take. A wait that times out leaves the call running.
  bool wait(milliseconds limit) override {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kSpins && !over_.load(std::memory_order_acquire); ++i)
      std::this_thread::yield();
    std::unique_lock lock(mutex_);
    while (!completed_) {
      const milliseconds spent =
          std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
      if (limit > kNoTimeout && spent >= limit)
        throw as_python(std::make_exception_ptr(timed_out(limit)));
      cv_.wait_for(lock, limit > kNoTimeout ? std::min(kSlice, limit - spent) : kSlice,
                   [this] { return completed_; });
      if (completed_) break;
      lock.unlock();
      raise_pending_signal();
      lock.lock();
    }
    if (exception_) throw as_python(exception_);
    lock.unlock();
    if (landing_) join(limit, start);
    return true;
  }

  std::vector<at::Tensor> result() override { return job_.outputs; }
  int sourceRank() const override {
    if (job_.type == c10d::OpType::RECV) return job_.calls.front().peer;
    return job_.source ? *job_.source : c10d::Work::sourceRank();
  }
  uint64_t getSequencenumber() const override { return sequence_; }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    {
      std::lock_guard lock(mutex_);
      if (!future_)
        future_ =
            c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    settle();
    return future_;
  }

 private:
  static constexpr int kSpins = 20;  // about 10 us of yields: most small calls end within it
  static constexpr milliseconds kSlice{100};
  static constexpr milliseconds kAsk{1};  // devices tell nobody, so who waits for one asks

  std::exception_ptr late_error() const { return landing_ ? landing_->error() : nullptr; }

  void join(milliseconds limit, std::chrono::steady_clock::time_point start) {
    do {
      if (const auto error = late_error()) throw as_python(error);
      landing_->join();
      if (limit <= kNoTimeout || landing_->passed()) return;
      std::this_thread::sleep_for(kAsk);
      raise_pending_signal();
    } while (std::chrono::steady_clock::now() - start < limit);
    throw as_python(std::make_exception_ptr(timed_out(limit)));
  }

  Timeout timed_out(milliseconds limit) const {
    ErrorFields fields{
        .op = job_.verb(), .sequence = static_cast<int64_t>(sequence_), .rank = rank_};
    fields.elapsed_s = std::chrono::duration<double>(limit).count();
    return Timeout("pycomm " + fields.op + ": wait() reached its timeout of " +
                       std::to_string(limit.count()) + " ms; the call itself goes on",
                   fields);
  }

  // Gives the future its value once there are both: whoever makes the second of them comes here.
  void settle() {
    {
      std::lock_guard lock(mutex_);
      if (!future_ || !completed_ || std::exchange(settled_, true)) return;
    }
    if (exception_) {
      future_->setErrorIfNeeded(std::make_exception_ptr(as_python(exception_)));
      return;
    }
    try {
      c10::OptionalStreamGuard on;  // what follows the future follows what this stream holds now
      if (landing_) on.reset_stream(landing_->stream());
      future_->markCompleted(c10::IValue(job_.outputs));
    } catch (...) {  // of a device that no longer answers
      future_->setErrorIfNeeded(std::current_exception());
    }
  }

  const uint64_t sequence_;
  Job job_;
  const std::shared_ptr<Landing> landing_;
  std::atomic<size_t> left_;
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
  std::atomic<bool> over_{false};
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool settled_ = false;
};

}  // namespace pycomm::bindings
