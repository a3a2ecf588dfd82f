#include "os/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace pycomm {

Process::Process(int64_t pid) {
#ifdef SYS_pidfd_open
  if (pid <= 0) return;
  const long fd = ::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0);
  if (fd >= 0)
    fd_ = Fd(static_cast<int>(fd));  // close-on-exec from the start
  else
    ended_ = errno == ESRCH;
#else
  (void)pid;
#endif
}

bool Process::look() {
  if (!fd_) return ended_;
  pollfd polled{fd_.get(), POLLIN, 0};
  if (::poll(&polled, 1, 0) > 0 && (polled.revents & POLLIN) != 0) found_ended();
  return ended_;
}

}  // namespace pycomm
