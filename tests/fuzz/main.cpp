// Hands libFuzzer's inputs to the target.
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  fuzz::one({reinterpret_cast<const std::byte*>(data), bytes});
  return 0;
}
