// A fuzz target defines one(), called for each input of libFuzzer. Any exception and any sanitizer
// report is a finding. Targets are *_fuzz.cpp; fuzzers.py builds them, hunt.py runs them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

namespace fuzz {

using Input = std::span<const std::byte>;

// Defined by each target.
void one(Input input);

inline std::string text_of(Input input) {
  return {reinterpret_cast<const char*>(input.data()), input.size()};
}

inline void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "FOUND: %s\n", what);
  __builtin_trap();
}

}  // namespace fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);
