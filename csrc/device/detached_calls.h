// Calls that may not return for a long time, each on its own thread.
#pragma once

#include <functional>
#include <memory>

#include "core/deadline.h"
#include "device/device.h"

namespace pycomm::device {

class DetachedCalls {
 public:
  explicit DetachedCalls(std::shared_ptr<Device> device);

  // Runs `body`, which owns all that it uses, with the device as the thread's current one. Runs it
  // on this thread if the system cannot create another.
  void start(std::function<void()> body) noexcept;
  // Whether all bodies return by the deadline. They continue otherwise.
  bool wait(const Deadline& deadline) noexcept;

 private:
  struct State;
  std::shared_ptr<Device> device_;
  std::shared_ptr<State> state_;  // threads own it too
};

}  // namespace pycomm::device
