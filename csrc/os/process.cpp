#include "os/process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace pycomm::os {

namespace {

bool is_readable(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return ::poll(&polled, 1, 0) > 0 && (polled.revents & POLLIN) != 0;
}

}  // namespace

Process::Process(int64_t pid) {
#ifdef SYS_pidfd_open
  if (pid <= 0) return;
  static std::mutex mutex;
  static auto* const known = new std::map<int64_t, std::weak_ptr<const Fd>>;  // never destroyed
  const std::lock_guard lock(mutex);
  std::erase_if(*known, [](const auto& entry) { return entry.second.expired(); });
  fd_ = (*known)[pid].lock();
  if (descriptor() >= 0 && !is_readable(descriptor())) return;  // the id was not reused since
  const long fd = ::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0);
  if (fd >= 0)  // close-on-exec from the start
    (*known)[pid] = fd_ = std::make_shared<const Fd>(static_cast<int>(fd));
  else
    fd_ = nullptr, ended_ = errno == ESRCH;
#else
  (void)pid;
#endif
}

bool Process::look() {
  if (descriptor() >= 0 && is_readable(descriptor())) found_ended();
  return ended_;
}

int64_t start_time(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(')');  // the name may hold blanks and brackets
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));  // from field 3 on
  std::string field;
  for (int number = 3; number < 22; ++number) fields >> field;
  int64_t started = 0;
  return fields >> started ? started : 0;
}

}  // namespace pycomm::os
