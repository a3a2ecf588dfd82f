// An event that wakes a thread in poll().
#pragma once

#include "os/fd.h"

namespace pycomm::os {

// Any thread may call.
class WakeEvent {
 public:
  WakeEvent();  // throws if this process may open no further descriptor
  // Readable from notify() to clear().
  int descriptor() const { return event_.get(); }
  void notify() const noexcept;
  void clear() const noexcept;

 private:
  Fd event_;
};

}  // namespace pycomm::os
