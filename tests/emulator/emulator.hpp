// The environment of a kernel under the emulator: CUDA's built-in names, and the functions of
// gpu::.
//
// CUDA's own headers, compiled as plain C++, supply the types; no library of NVIDIA's is linked.
// Defines only the names that kernels of the project use. Included only by csrc/gpu.hpp.
#pragma once

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>

#include "grid.hpp"
#include "runtime.hpp"

#define threadIdx (::emulator::current->thread_index)
#define blockIdx (::emulator::current->block_index)
#define blockDim (::emulator::current->block_size)
#define gridDim (::emulator::current->grid_size)
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

namespace emulator {

template <class T>
inline constexpr char kTypeKey{};

template <class T>
uint64_t to_bits(T value) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
T& shared() {
  return *static_cast<T*>(shared_memory(&kTypeKey<T>, sizeof(T), alignof(T)));
}
template <class T>
T* dynamic_shared() {
  return static_cast<T*>(dynamic_shared_memory());
}
inline unsigned lane_id() { return current->lane; }

// As a GPU does; a sanitizer of the compiler need not see the address of a whole object.
template <class T>
void check_address(const T* p, Where where) {
  static_assert(sizeof(T) <= 16);
  if (reinterpret_cast<uintptr_t>(p) % alignof(T) != 0) fail("misaligned address", where);
}
template <class T>
T load(const T* p, Where where = Where::current()) {
  check_address(p, where);
  count_load(sizeof(T));
  return *p;
}
template <class T>
void store(T* p, std::type_identity_t<T> value, Where where = Where::current()) {
  check_address(p, where);
  count_store(sizeof(T));
  *p = value;
}
template <class T>
T load_fresh(const T* p, Where where = Where::current()) {
  return load(p, where);
}
// Loops poll flags: another thread runs first.
inline unsigned load_acquire(const unsigned* p, Where where = Where::current()) {
  spin(where);
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
// As above, and the host sets the word.
inline unsigned load_acquire_system(const unsigned* p, Where where = Where::current()) {
  wait_for_host(where);
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}
inline unsigned long long load_relaxed(const unsigned long long* p,
                                       Where where = Where::current()) {
  spin(where);
  return __atomic_load_n(p, __ATOMIC_RELAXED);
}
inline void store_relaxed(unsigned long long* p, unsigned long long value) {
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
  maybe_switch();
}
inline void store_release(unsigned* p, unsigned value) {
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
  maybe_switch();
}
inline unsigned add_release(unsigned* p, unsigned value) {
  maybe_switch();
  learn();
  return __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL);
}
inline void pause(Where where = Where::current()) { spin(where); }
// Longer, so that a thread that waits for the host leaves it the processor.
inline void sleep(unsigned ns) {
  std::this_thread::sleep_for(std::chrono::microseconds(20) + std::chrono::nanoseconds(ns));
}

// Enqueues a grid with its arguments by value, as CUDA does.
template <class... P>
cudaError_t launch(void (*kernel)(P...), const Shape& shape, cudaStream_t stream,
                   std::type_identity_t<P>... arguments) {
  using Call = std::pair<void (*)(P...), std::tuple<P...>>;
  note_launch(reinterpret_cast<const void*>(kernel));
  Call call{kernel, {std::move(arguments)...}};
  const auto run = [shape, call = std::move(call)]() mutable {
    const auto entry = [](void* p) {
      auto& [function, values] = *static_cast<Call*>(p);
      std::apply(function, values);
    };
    if (options().before_grid) options().before_grid();
    run_grid(shape, entry, &call);
  };
  return shape.waits_for_host ? enqueue_beside(stream, run, {.threads = resident_threads(shape)})
                              : enqueue(stream, run);
}

template <class T, class F>
T atomic_update(T* p, F next) {
  using Word = std::conditional_t<sizeof(T) == 8, unsigned long long, unsigned>;
  static_assert(sizeof(T) == sizeof(Word));
  maybe_switch();
  auto* word = reinterpret_cast<Word*>(p);
  Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(
      word, &old, std::bit_cast<Word>(static_cast<T>(next(std::bit_cast<T>(old)))), false,
      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return std::bit_cast<T>(old);
}

}  // namespace emulator

inline void __syncthreads(emulator::Where where = emulator::Where::current()) {
  emulator::sync_block(false, where);
}
inline int __syncthreads_count(int p, emulator::Where where = emulator::Where::current()) {
  return static_cast<int>(emulator::sync_block(p != 0, where));
}
inline int __syncthreads_or(int p, emulator::Where where = emulator::Where::current()) {
  return emulator::sync_block(p != 0, where) != 0;
}
inline void __syncwarp(unsigned mask = ~0u, emulator::Where where = emulator::Where::current()) {
  emulator::warp({emulator::WarpOp::sync, mask, 0, 0, 32, where});
}
inline unsigned __ballot_sync(unsigned mask, int p,
                              emulator::Where where = emulator::Where::current()) {
  return unsigned(emulator::warp({emulator::WarpOp::ballot, mask, p != 0, 0, 32, where}));
}
inline int __all_sync(unsigned mask, int p, emulator::Where where = emulator::Where::current()) {
  return int(emulator::warp({emulator::WarpOp::all, mask, p != 0, 0, 32, where}));
}
inline int __any_sync(unsigned mask, int p, emulator::Where where = emulator::Where::current()) {
  return int(emulator::warp({emulator::WarpOp::any, mask, p != 0, 0, 32, where}));
}
template <class T>
unsigned __match_any_sync(unsigned mask, T v, emulator::Where where = emulator::Where::current()) {
  return unsigned(
      emulator::warp({emulator::WarpOp::match, mask, emulator::to_bits(v), 0, 32, where}));
}
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32,
              emulator::Where where = emulator::Where::current()) {
  return emulator::from_bits<T>(
      emulator::warp({emulator::WarpOp::shuffle, mask, emulator::to_bits(v), unsigned(source),
                      unsigned(width), where}));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32,
                 emulator::Where where = emulator::Where::current()) {
  return emulator::from_bits<T>(emulator::warp(
      {emulator::WarpOp::up, mask, emulator::to_bits(v), by, unsigned(width), where}));
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32,
                   emulator::Where where = emulator::Where::current()) {
  return emulator::from_bits<T>(emulator::warp(
      {emulator::WarpOp::down, mask, emulator::to_bits(v), by, unsigned(width), where}));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32,
                  emulator::Where where = emulator::Where::current()) {
  return emulator::from_bits<T>(
      emulator::warp({emulator::WarpOp::across, mask, emulator::to_bits(v), unsigned(lanes),
                      unsigned(width), where}));
}
// No __reduce_*_sync: the oldest GPU that the kernels are built for (7.5) has none.

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
using std::max;
using std::min;

// As in CUDA these order nothing: what they guard is published by gpu::store_release.
template <class T>
T atomicAdd(T* p, std::type_identity_t<T> v) {
  return emulator::atomic_update(p, [v](T x) { return x + v; });
}
template <class T>
T atomicMax(T* p, std::type_identity_t<T> v) {
  return emulator::atomic_update(p, [v](T x) { return std::max(x, v); });
}
template <class T>
T atomicOr(T* p, std::type_identity_t<T> v) {
  return emulator::atomic_update(p, [v](T x) { return x | v; });
}
template <class T>
T atomicExch(T* p, std::type_identity_t<T> v) {
  return emulator::atomic_update(p, [v](T) { return v; });
}
template <class T>
T atomicCAS(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> v) {
  return emulator::atomic_update(p, [expected, v](T x) { return x == expected ? v : x; });
}
