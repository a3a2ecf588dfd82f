// Encodes the values of a compact packet, one thread block per 4096 that share levels.
#pragma once

#include "cuda/compact_write.cuh"
#include "cuda/value_codes.cuh"

namespace pycomm::cuda {

// V: type of the input and of the residual. residual = residual + (value - encoded value).
template <class V>
__global__ void __launch_bounds__(kValueThreads) write_values(const __grid_constant__ Writing w) {
  if (w.choice->all.bad) return;
  auto& own = gpu::shared<ValueSpace>().value;
  const V* const values = static_cast<const V*>(w.values);
  V* const residual = static_cast<V*>(w.residual);
  for (uint64_t first = uint64_t{blockIdx.x} * kLevelled; first < w.k;
       first += uint64_t{gridDim.x} * kLevelled) {
    const unsigned n = static_cast<unsigned>(min(uint64_t{kLevelled}, w.k - first));
    uint8_t* const to = w.out + w.head_bytes + first / kLevelled * levelled_bytes(w.value_code);
    for (unsigned i = threadIdx.x; i < n; i += kValueThreads)
      own[i] = narrow<float>(values[first + i]);
    __syncthreads();
    write_levels(w.value_code, n, to);
    __syncthreads();
    for (unsigned i = threadIdx.x; residual != nullptr && i < n; i += kValueThreads) {
      V& rest = residual[w.indices[first + i]];
      const V sent = static_cast<V>(read_value(w.value_code, to, i));
      rest = canonical(add(rest, add(values[first + i], -sent)));
    }
    __syncthreads();
  }
}

}  // namespace pycomm::cuda
