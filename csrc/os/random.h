// Bytes that nobody can guess, from the kernel: keys, nonces, names of sockets.
#pragma once

#include <array>
#include <cstdint>

namespace pycomm {

std::array<uint8_t, 32> random_bytes();

}  // namespace pycomm
