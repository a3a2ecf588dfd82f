// Shared by all cases: arrays on the emulated device, and check().
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cuda/cuda_kernels.h"
#include "grid.hpp"
#include "kernels/device_kernels.h"

namespace cases {

// The code under test.
inline pycomm::cuda::CudaKernels& kernels() {
  static pycomm::cuda::CudaKernels all;
  return all;
}

inline void check(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("WRONG: %s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

inline void check_cuda(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("FAILED: %s\n", cudaGetErrorString(error));
  std::fflush(stdout);
  std::_Exit(3);
}

// The stream of a case; the default stream would order more operations than a caller's stream.
inline cudaStream_t stream() {
  static cudaStream_t one = [] {
    cudaStream_t s = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
  }();
  return one;
}
inline pycomm::kernels::Queue queue() { return {0, stream()}; }
inline void finish() { check_cuda(cudaStreamSynchronize(stream())); }

// An array of the device of exactly `count` elements, `skew` elements past an aligned address.
template <class T>
class Device {
 public:
  explicit Device(size_t count, size_t skew = 0) : count_(count), skew_(skew) {
    void* p = nullptr;
    check_cuda(cudaMalloc(&p, (count + skew) * sizeof(T)));
    base_ = static_cast<T*>(p);
  }
  explicit Device(const std::vector<T>& from, size_t skew = 0) : Device(from.size(), skew) {
    write(from);
  }
  ~Device() { cudaFree(base_); }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  T* at() const { return base_ + skew_; }
  size_t size() const { return count_; }
  void write(const std::vector<T>& from) {
    check_cuda(
        cudaMemcpyAsync(at(), from.data(), count_ * sizeof(T), cudaMemcpyHostToDevice, stream()));
    finish();
  }
  void clear() { write(std::vector<T>(count_)); }
  std::vector<T> read() {
    std::vector<T> to(count_);
    check_cuda(
        cudaMemcpyAsync(to.data(), at(), count_ * sizeof(T), cudaMemcpyDeviceToHost, stream()));
    finish();
    return to;
  }

 private:
  size_t count_, skew_;
  T* base_ = nullptr;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Numbers as residuals have them: many small, some alike, a few zeros.
inline std::vector<float> numbers(std::mt19937& random, size_t count, float size = 1) {
  std::normal_distribution<float> normal(0, size);
  std::vector<float> all(count);
  for (float& x : all) {
    x = normal(random);
    if (random() % 8 == 0) x = std::round(x * 4) / 4;
  }
  return all;
}

// The k largest magnitudes, ties to the lower index, in the order of the indices: by sorting.
inline std::vector<int32_t> largest(const std::vector<float>& x, size_t k) {
  const auto key = [&](int32_t i) {
    uint32_t bits;
    std::memcpy(&bits, &x[static_cast<size_t>(i)], 4);
    return bits & 0x7fffffffu;
  };
  std::vector<int32_t> order(x.size());
  for (size_t i = 0; i < x.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return key(a) != key(b) ? key(a) > key(b) : a < b; });
  order.resize(k);
  std::sort(order.begin(), order.end());
  return order;
}

void run_topk(std::mt19937& random);
void run_step(std::mt19937& random);
void run_changed(std::mt19937& random);   // an array that changes between two kernels
void run_brief(std::mt19937& random);     // a step for the slow sanitizers
void run_graph(std::mt19937& random);     // captured once, replayed
void run_infinity(std::mt19937& random);  // without masking
void run_packets(std::mt19937& random);
void run_compact(std::mt19937& random);
void run_compact_bits(std::mt19937& random);
void run_compact_batch(std::mt19937& random);
void run_compact_brief(std::mt19937& random);
void run_compact_graph(std::mt19937& random);
void run_dense(std::mt19937& random);
void run_quantize(std::mt19937& random);
void run_groups(std::mt19937& random);

}  // namespace cases
