// Cryptographically secure random bytes of the kernel, for keys, nonces and names of sockets.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace pycomm::os {

std::array<uint8_t, 32> random_bytes();

// 32 random letters, 128 bits.
std::string random_name();

}  // namespace pycomm::os
