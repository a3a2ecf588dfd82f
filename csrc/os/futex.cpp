#include "os/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace pycomm::os {

void wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen,
                     std::chrono::nanoseconds limit) {
  if (limit.count() <= 0) return;
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec left{whole.count(), (limit - whole).count()};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &left, nullptr, 0);
}

void wake_waiters(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace pycomm::os
