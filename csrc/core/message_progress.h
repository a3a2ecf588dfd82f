// The progress of an exchange of messages whose data is written and read by other threads while it
// runs.
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <utility>

namespace pycomm {

class MessageProgress {
 public:
  MessageProgress() = default;
  MessageProgress(const MessageProgress&) = delete;
  MessageProgress& operator=(const MessageProgress&) = delete;
  virtual ~MessageProgress() = default;

  // On the thread of the exchange. `index`: of a message in the list of the exchange.
  // How many bytes from the beginning of a message may be sent. It may grow until it is the size.
  virtual size_t ready(size_t index) const = 0;
  // The first `bytes` bytes of a received message are in the memory of its receive.
  virtual void received(size_t index, size_t bytes) = 0;

  // Any thread, after ready() grew: the exchange asks again.
  void wake() const {
    const std::lock_guard lock(mutex_);
    if (wake_) wake_();
  }
  // For the exchange: wake() calls it. Empty: the exchange is over.
  void set_wake(std::function<void()> wake) {
    const std::lock_guard lock(mutex_);
    wake_ = std::move(wake);
  }

 private:
  mutable std::mutex mutex_;  // guards wake_
  std::function<void()> wake_;
};

}  // namespace pycomm
