// The processor on which a thread runs.
#pragma once

#include <sched.h>

#include <span>

namespace pycomm::os {

inline constexpr int kUnknownProcessor = -1;

// Of this thread, now; kUnknownProcessor if the system does not say.
inline int current_processor() { return ::sched_getcpu(); }

// Lets other threads run on it.
inline void yield_processor() { (void)::sched_yield(); }

// Keeps the calling thread off some processors until the end of its lifetime; then the thread gets
// its affinity mask back. A mask that the user or another thread sets meanwhile takes precedence.
// Use it on one thread.
class ProcessorExclusion {
 public:
  ProcessorExclusion() = default;
  ProcessorExclusion(const ProcessorExclusion&) = delete;
  ProcessorExclusion& operator=(const ProcessorExclusion&) = delete;
  ~ProcessorExclusion();

  // Moves the thread to a processor outside `taken` or, if its affinity mask has no such one, to
  // any other than `current`. Never leaves the mask that the thread had, or was given since. False:
  // it has no other processor.
  bool leave(int current, std::span<const int> taken);

 private:
  cpu_set_t before_, during_;  // set by leave(): clearing them would slow small calls
  bool moved_ = false;
};

}  // namespace pycomm::os
