#include "engine/link.h"

#include <vector>

namespace pycomm::engine {

void Link::close() noexcept {
  std::vector<std::byte> rest;
  try {
    rest = writer_.unsent();
  } catch (...) {  // out of memory: the peer sees only the closed connection
  }
  channel_->close(rest);
}

}  // namespace pycomm::engine
