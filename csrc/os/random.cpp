// See random.h.
#include "os/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstddef>

#include "os/socket.h"

namespace pycomm::os {

std::array<uint8_t, 32> random_bytes() {
  std::array<uint8_t, 32> bytes{};
  size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t got = ::getrandom(bytes.data() + have, bytes.size() - have, 0);
    if (got < 0 && errno != EINTR) throw_errno("asking the kernel for random bytes");
    if (got > 0) have += static_cast<size_t>(got);
  }
  return bytes;
}

std::string random_name() {
  std::string name;
  for (const uint8_t byte : random_bytes()) name += static_cast<char>('a' + byte % 16);
  return name;
}

}  // namespace pycomm::os
