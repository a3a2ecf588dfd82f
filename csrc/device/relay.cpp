#include "device/relay.h"

#include <atomic>
#include <utility>

#include "os/thread.h"

namespace pycomm {

Relay::Relay(std::shared_ptr<Device> device, void* stream)
    : device_(std::move(device)),
      stream_(stream),
      flag_(static_cast<uint32_t*>(device_->allocate_host(sizeof(uint32_t)))) {
  set(1);
  try {
    thread_ = start_thread("pycomm-relay", [this] { work(); });
  } catch (...) {
    device_->release_host(flag_);
    throw;
  }
}

Relay::~Relay() {
  (void)stop();
  device_->finish(stream_);
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  device_->release_host(flag_);
}

// Release: whoever sees the flag, on the device, sees what the body wrote.
void Relay::set(uint32_t value) { std::atomic_ref(*flag_).store(value, std::memory_order_release); }

void Relay::begin(Body body, bool captured) {
  auto made = std::make_unique<Errand>(Errand{this, std::move(body), captured});
  Errand* const errand = made.get();
  {
    const std::lock_guard lock(mutex_);
    errands_.push_back(std::move(made));
  }
  device_->call(stream_, &arrived, errand);
}

void Relay::hold() { device_->wait_until(stream_, flag_, 1); }

// On a thread of CUDA's, which must wait for nobody.
void Relay::arrived(void* errand) {
  const auto* const mine = static_cast<Errand*>(errand);
  mine->relay->take(*mine);
}

// The stream comes to its next errand only behind the last one, so that the flag is of one alone.
void Relay::take(const Errand& errand) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopped_) {
      set(0);
      waiting_.push_back(errand.body);
    }
    if (!errand.captured)
      std::erase_if(errands_, [&](const auto& one) { return one.get() == &errand; });
  }
  changed_.notify_all();
}

void Relay::work() {
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
    set(1);
  }
}

bool Relay::stop() noexcept {
  const std::lock_guard lock(mutex_);
  stopped_ = true;
  waiting_.clear();
  set(1);
  return working_;
}

}  // namespace pycomm
