// Cryptographically secure random bytes of the kernel, for keys, nonces and names of sockets.
#pragma once

#include <array>
#include <cstdint>

namespace pycomm::os {

std::array<uint8_t, 32> random_bytes();

}  // namespace pycomm::os
