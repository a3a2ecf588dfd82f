// What the arguments of all kernels are made of.
#pragma once

#include <cstddef>

namespace pycomm::kernels {

// The device and stream of a call. The CPU ignores both.
struct Queue {
  int device = 0;
  void* stream = nullptr;
};

struct Workspace {
  void* data = nullptr;
  size_t bytes = 0;
};

// The tables below come from Python as rows of 64-bit words, so they have no other members.

struct Array {
  void* data;
  size_t count;
};

}  // namespace pycomm::kernels
