// Shared by all cases: arrays in host memory and on the device, calls of both implementations of
// DeviceKernels, and check(). Compiled for the emulator, and with ON_GPU for a GPU.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/dtype.h"
#include "cuda/cuda_kernels.h"
#include "kernels/device_kernels.h"
#ifndef ON_GPU
#include "grid.hpp"
#endif

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

// One implementation of the kernels, and where its arrays are.
struct Side {
  pycomm::kernels::DeviceKernels& kernels;
  pycomm::kernels::Queue queue;
  bool on_device;
};
inline Side here() { return {pycomm::kernels::cpu_kernels(), {}, false}; }
inline Side there() { return {kernels(), queue(), true}; }

// Calls both implementations.
template <class F>
void on_both(F call) {
  call(here());
  call(there());
  finish();
}

// An array of both sides with the same contents at first. `skew` as of Device.
template <class T>
class Twin {
 public:
  explicit Twin(std::vector<T> values, size_t skew = 0)
      : here_(std::move(values)), there_(here_, skew) {}
  explicit Twin(size_t count, size_t skew = 0) : Twin(std::vector<T>(count), skew) {}

  T* at(const Side& side) { return side.on_device ? there_.at() : here_.data(); }
  size_t size() const { return here_.size(); }
  const std::vector<T>& values() const { return here_; }
  void write(std::vector<T> values) {
    here_ = std::move(values);
    there_.write(here_);
  }
  void compare(const std::string& what) { compare(what, size()); }
  // The first `count` elements.
  void compare(const std::string& what, size_t count) {
    const std::vector<T> found = there_.read();
    for (size_t i = 0; i < count; ++i)
      if (std::memcmp(&found[i], &here_[i], sizeof(T)) != 0)
        check(false, what + ": element " + std::to_string(i) + " of " + std::to_string(size()));
  }

 private:
  std::vector<T> here_;
  Device<T> there_;
};

// A workspace of one side, zeroed.
class Room {
 public:
  Room(const Side& side, size_t bytes) : bytes_(bytes) {
    if (side.on_device) {
      there_ = std::make_unique<Device<std::byte>>(bytes);
      there_->clear();
    } else {
      here_.resize(bytes);
    }
  }
  pycomm::kernels::Workspace space() { return {there_ ? there_->at() : here_.data(), bytes_}; }

 private:
  size_t bytes_;
  std::vector<std::byte> here_;
  std::unique_ptr<Device<std::byte>> there_;
};

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

// The same with numbers that have arithmetic of their own among them.
inline std::vector<float> special_numbers(std::mt19937& random, size_t count) {
  static constexpr float kSpecial[] = {NAN,    INFINITY,        -INFINITY,     -0.0f,
                                       1e-45f, -1.1754942e-38f, 3.4028235e38f, 65520.0f};
  std::vector<float> all = numbers(random, count);
  for (size_t i = 3; i < count; i += 17) all[i] = kSpecial[i / 17 % std::size(kSpecial)];
  return all;
}

constexpr pycomm::Dtype kFloats[] = {pycomm::Dtype::float16, pycomm::Dtype::bfloat16,
                                     pycomm::Dtype::float32, pycomm::Dtype::float64};

// The bytes of an array of this float dtype.
inline std::vector<std::byte> as_bytes(std::vector<float> values, pycomm::Dtype dtype) {
  std::vector<std::byte> bytes(values.size() * bytes_of(dtype));
  pycomm::kernels::cpu_kernels().cast({values.data(), values.size(), pycomm::Dtype::float32},
                                      {bytes.data(), values.size(), dtype}, {});
  return bytes;
}

// `k` of `count` positions, ascending.
inline std::vector<int32_t> positions(std::mt19937& random, size_t count, size_t k,
                                      size_t first = 0) {
  std::vector<int32_t> all(k);
  size_t left = k;
  for (size_t i = 0; i < count && left > 0; ++i)
    if (random() % (count - i) < left) all[k - left--] = static_cast<int32_t>(first + i);
  return all;
}

// Whether arrays are as large as in training, and not as small as the emulator and
// compute-sanitizer need them.
bool large();
// `small`, and with large() sizes at the edges of tiles and of grids, and of whole models.
std::vector<size_t> sizes(std::vector<size_t> small);

void run_topk(std::mt19937& random);
void run_step(std::mt19937& random);
void run_step_dtypes(std::mt19937& random);
void run_changed(std::mt19937& random);   // an array that changes between two kernels
void run_brief(std::mt19937& random);     // a step for the slow sanitizers
void run_graph(std::mt19937& random);     // captured once, replayed
void run_infinity(std::mt19937& random);  // without masking
void run_packets(std::mt19937& random);
void run_packet_dtypes(std::mt19937& random);
void run_compact(std::mt19937& random);
void run_compact_bits(std::mt19937& random);
void run_compact_batch(std::mt19937& random);
void run_compact_brief(std::mt19937& random);
void run_compact_graph(std::mt19937& random);
void run_dense(std::mt19937& random);
void run_quantize(std::mt19937& random);
void run_groups(std::mt19937& random);

// Prints the times of all kernels, or of these; only on a GPU.
int time_kernels(const std::vector<std::string_view>& names);

}  // namespace cases
