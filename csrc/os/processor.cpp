#include "os/processor.h"

namespace pycomm::os {
namespace {

void exclude(int processor, cpu_set_t& from) {
  if (processor >= 0 && processor < CPU_SETSIZE) CPU_CLR(static_cast<size_t>(processor), &from);
}

// Also stores the mask that the thread then has.
bool restrict_to(const cpu_set_t& allowed, cpu_set_t& now) {
  return CPU_COUNT(&allowed) > 0 && ::sched_setaffinity(0, sizeof allowed, &allowed) == 0 &&
         ::sched_getaffinity(0, sizeof now, &now) == 0;
}

}  // namespace

ProcessorExclusion::~ProcessorExclusion() {
  if (!moved_) return;
  cpu_set_t now{};
  if (::sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, &during_))
    (void)::sched_setaffinity(0, sizeof before_, &before_);
}

bool ProcessorExclusion::leave(int current, std::span<const int> taken) {
  cpu_set_t now{};
  // Fails on a machine with more processors than a cpu_set_t holds.
  if (::sched_getaffinity(0, sizeof now, &now) != 0) return false;
  const bool own = moved_ && CPU_EQUAL(&now, &during_);  // this object set the present mask
  if (!own) before_ = now;
  cpu_set_t free = before_, others = before_;
  exclude(current, others);
  exclude(current, free);
  for (const int processor : taken) exclude(processor, free);
  const bool left = restrict_to(free, during_) || restrict_to(others, during_);
  moved_ = own || left;
  return left;
}

}  // namespace pycomm::os
