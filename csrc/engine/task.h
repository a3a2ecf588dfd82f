// The interface of what an engine runs: moves bytes over the links until it is done.
#pragma once

#include <cstddef>
#include <optional>

#include "os/processor.h"

namespace pycomm::engine {

class Task {
 public:
  virtual ~Task() = default;
  // Its call begins: it may use the links from now on.
  virtual void begin() {}
  // Makes the progress that is possible without waiting; true if it moved bytes.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // The peer that it waits for, or kNoRank.
  virtual int sending_to() const = 0;
  virtual int receiving_from() const = 0;
  // Whether it can end before it is done, for a later task to continue.
  virtual bool can_be_suspended() const { return false; }
  // A lower bound of the bytes that it still expects from that peer.
  virtual size_t receiving_bytes() const { return 0; }
  // If the awaited peer last ran on the processor of this thread, moves the thread to another one
  // for the lifetime of `exclusion`. False: it must stay, and waits best by yielding. Empty: the
  // task does not know the processors, but the channels may.
  virtual std::optional<bool> leave_processor_of_peer(os::ProcessorExclusion& /*exclusion*/) {
    return std::nullopt;
  }
  // Around a sleep, for tasks that another thread or process wakes: poll once more between arm()
  // and the sleep, as with channels.
  virtual void arm() {}
  virtual void disarm() {}
  // A descriptor that is readable if the task can advance, also during the sleep; or -1.
  virtual int wake_descriptor() const { return -1; }
};

}  // namespace pycomm::engine
