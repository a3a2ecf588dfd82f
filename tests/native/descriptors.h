// Counts and limits the descriptors of this process.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>

namespace pycomm {

inline constexpr int kManyDescriptors = 4096;

inline bool is_open(int fd) { return ::fcntl(fd, F_GETFD) != -1; }

inline int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < kManyDescriptors; ++fd) count += is_open(fd) ? 1 : 0;
  return count;
}

// During its lifetime this process may open only this many further descriptors.
class FewDescriptors {
 public:
  explicit FewDescriptors(int more) {
    ::getrlimit(RLIMIT_NOFILE, &old_);
    rlimit few = old_;
    few.rlim_cur = 0;  // one more than the highest number that may be given out
    for (int free = 0; free < more || is_open(static_cast<int>(few.rlim_cur)); ++few.rlim_cur)
      free += is_open(static_cast<int>(few.rlim_cur)) ? 0 : 1;
    ::setrlimit(RLIMIT_NOFILE, &few);
  }
  ~FewDescriptors() { ::setrlimit(RLIMIT_NOFILE, &old_); }

 private:
  rlimit old_{};
};

}  // namespace pycomm
