#include "device/host_callback_thread.h"

#include <atomic>
#include <utility>

#include "os/thread.h"

namespace pycomm::device {

HostCallbackThread::HostCallbackThread(std::shared_ptr<Device> device, void* stream)
    : device_(std::move(device)),
      stream_(stream),
      flags_(static_cast<uint32_t*>(device_->allocate_host(kSteps * sizeof(uint32_t)))) {
  set_flags(1);
  try {
    thread_ = os::start_thread("pycomm-callback", [this] { work(); });
  } catch (...) {
    device_->release_host(flags_);
    throw;
  }
}

HostCallbackThread::~HostCallbackThread() {
  (void)stop();
  device_->finish(stream_);
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  device_->release_host(flags_);
}

// Release order: a device that sees the flag also sees the writes of the body.
void HostCallbackThread::set_flag(size_t step, uint32_t value) {
  std::atomic_ref(flags_[step]).store(value, std::memory_order_release);
}

void HostCallbackThread::set_flags(uint32_t value) {
  for (size_t step = 0; step < kSteps; ++step) set_flag(step, value);
}

void HostCallbackThread::begin(Body body, bool captured) {
  enqueue({this, std::move(body), captured, false});
}

void HostCallbackThread::notify(Body body, bool captured) {
  enqueue({this, std::move(body), captured, true});
}

void HostCallbackThread::enqueue(PendingCallback pending) {
  auto made = std::make_unique<PendingCallback>(std::move(pending));
  PendingCallback* const callback = made.get();
  {
    const std::lock_guard lock(mutex_);
    pending_.push_back(std::move(made));
  }
  device_->call(stream_, &arrived, callback);
}

void HostCallbackThread::stream_wait(void* stream, size_t step) {
  device_->wait_until(stream, flags_ + step, 1);
}

// Runs on a CUDA thread, which must not wait for another rank.
void HostCallbackThread::arrived(void* callback) {
  const auto* const mine = static_cast<PendingCallback*>(callback);
  mine->owner->take(*mine);
}

// The stream reaches its next begin() only after the last step of the one before, so the flags
// belong to one body at a time.
void HostCallbackThread::take(const PendingCallback& callback) {
  Body now;
  {
    const std::lock_guard lock(mutex_);
    if (callback.on_cuda_thread) {
      now = callback.body;
    } else if (!stopped_) {
      set_flags(0);
      waiting_.push_back(callback.body);
    }
    if (!callback.captured)
      std::erase_if(pending_, [&](const auto& one) { return one.get() == &callback; });
  }
  changed_.notify_all();
  if (now) now();
}

void HostCallbackThread::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    const Body body = std::exchange(waiting_.front(), {});
    waiting_.pop_front();
    working_ = true;
    lock.unlock();
    body();
    lock.lock();
    working_ = false;
    set_flags(1);
  }
}

bool HostCallbackThread::stop() noexcept {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  waiting_.clear();
  set_flags(1);
  return working_;
}

}  // namespace pycomm::device
