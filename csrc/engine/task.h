// The interface of what an engine runs: moves bytes over the links until it is done.
#pragma once

#include <cstddef>

namespace pycomm::engine {

class Task {
 public:
  virtual ~Task() = default;
  // Makes the progress that is possible without waiting; true if it moved bytes.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // The peer that it waits for, or kNoRank.
  virtual int sending_to() const = 0;
  virtual int receiving_from() const = 0;
  // A lower bound of the bytes that it still expects from that peer.
  virtual size_t receiving_bytes() const { return 0; }
  // Around a sleep, for tasks that another thread or process wakes: poll once more between arm()
  // and the sleep, as with channels.
  virtual void arm() {}
  virtual void disarm() {}
};

}  // namespace pycomm::engine
