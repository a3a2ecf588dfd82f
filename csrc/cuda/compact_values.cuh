// Encodes the values of compact packets, one thread block per 4096 that share levels.
#pragma once

#include "cuda/compact_write.cuh"
#include "cuda/value_codes.cuh"

namespace pycomm::cuda {

// V: type of the input and of the errors, value - encoded value; -0 if the indices are invalid.
template <class V, class Packets>
__global__ void __launch_bounds__(kValueThreads)
    write_values(const __grid_constant__ Packets packets) {
  const Writing& w = packets.of[blockIdx.y];
  const bool bad = w.choice->all.bad;
  auto& own = gpu::shared<ValueSpace>().value;
  const V* const values = static_cast<const V*>(w.values);
  V* const errors = static_cast<V*>(w.errors);
  for (uint64_t i = uint64_t{blockIdx.x} * kValueThreads + threadIdx.x;
       bad && errors != nullptr && i < w.value_count; i += uint64_t{gridDim.x} * kValueThreads)
    errors[i] = -V{0};
  if (bad) return;
  for (uint64_t first = uint64_t{blockIdx.x} * kLevelled; first < w.value_count;
       first += uint64_t{gridDim.x} * kLevelled) {
    const unsigned n = static_cast<unsigned>(min(uint64_t{kLevelled}, w.value_count - first));
    uint8_t* const to = w.out + w.head_bytes + first / kLevelled * levelled_bytes(w.value_code);
    for (unsigned i = threadIdx.x; i < n; i += kValueThreads)
      own[i] = narrow<float>(values[first + i]);
    __syncthreads();
    write_levels(w.value_code, n, to);
    __syncthreads();
    for (unsigned i = threadIdx.x; errors != nullptr && i < n; i += kValueThreads) {
      const V sent = static_cast<V>(read_value(w.value_code, to, i));
      errors[first + i] = canonical(add(values[first + i], -sent));
    }
    __syncthreads();
  }
}

}  // namespace pycomm::cuda
